"""ParagonSR2 super-resolution: fixed upsampling plus a learned detail path.

The fixed path always keeps the low frequencies right. After Philip Hofmann's ParagonSR2
(github.com/Phhofm/ParagonSR2). `conv_config` and `variant_config` hold sizes, without PyTorch;
`paragon_conv` the purely convolutional model, `tiers` the published tiers and `variant` the
variants from nano to xl.
"""
