"""The command line: one thin file per command. Heavy imports wait until a command runs."""
