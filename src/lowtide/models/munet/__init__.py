"""MUNet, the U-Net discriminator for GAN training of ParagonSR2.

After Philip Hofmann's MUNet (traiNNer-redux in delafer's fork, commit 069b6d59, MIT).
`munet_config` holds the sizes, without PyTorch; `branches` the feature branches; `network` the
whole model.
"""
