"""Commands of ``titan``, a module each, imported when it is called; their ``main(arguments)`` returns the exit status."""
