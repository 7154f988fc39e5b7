"""The command `davincirunctl`: looks at jobs of this host, steers them, and checks a node before a job."""
