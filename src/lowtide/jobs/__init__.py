"""Jobs behind the commands and the public functions, one module each."""
