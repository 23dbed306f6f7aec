"""The family LDM4TS, whose files `files` reads."""

from lowtide.models.families import ModelFamily

NAME = "LDM4TS"
FAMILY = ModelFamily(name=NAME, command="lowtide forecast DATA -m FOLDER")
