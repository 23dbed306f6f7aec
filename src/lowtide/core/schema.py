"""Version of the JSON documents that Lowtide writes: reports, plans and errors."""

# 2 renamed the keys of 1 (Lowtide 0.1) into the words of the field.
SCHEMA_VERSION = 2
