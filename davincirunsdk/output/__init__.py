"""Where displayed output goes: terminal, notebook, nowhere."""
