"""MUNet: the discriminator that the ParagonSR2 kind is trained against.

After Philip Hofmann's MUNet (traiNNer-redux in delafer's fork, commit 069b6d59, MIT). `config`
holds the shape, without PyTorch; `branches` what looks at a picture; `network` puts it together.
"""
