"""The verbs of the command line: arguments and printing, one module each; the work lies below."""
