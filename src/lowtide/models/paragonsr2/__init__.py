"""ParagonSR2 super-resolution: fixed upsampling plus a learned detail path.

The fixed path always keeps the low frequencies right. After Philip Hofmann's ParagonSR2
(github.com/Phhofm/ParagonSR2). `family` says how its files are known and what trainings call its
networks, `config` holds sizes, both without PyTorch; `paragon_conv` is the purely convolutional
model, `tiers` the published tiers, `variant` the variants from nano to xl, and `munet` the
discriminator of their GAN training.
"""
