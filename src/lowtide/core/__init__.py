"""Words every room shares. Imports no other room, and no heavy library on import."""
