"""The family VideoVAE, whose files `files` reads."""

from lowtide.models.families import ModelFamily
from lowtide.models.video_vae.config import CLASS_NAME

FAMILY = ModelFamily(name=CLASS_NAME, command="lowtide vae encode VIDEO -o LATENTS -m MODEL")
