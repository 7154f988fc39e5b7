"""`python -m davincirunsdk` is the command `davincirun`."""

from davincirunsdk.cli import main

main()
