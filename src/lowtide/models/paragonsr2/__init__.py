"""The ParagonSR2 kind: a fixed upsampling path that is always right about the low frequencies,
and a learned path that adds the detail.

After Philip Hofmann's ParagonSR2 (github.com/Phhofm/ParagonSR2). `config` holds the shapes,
without PyTorch; `conv` the convolutional member. A member with attention gets its own file.
"""
