"""Jobs behind the commands and the public functions, a room each."""
