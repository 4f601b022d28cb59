"""Policy: traces, problems, plans, the simulator, the daemon, the command line. This package knows no frameworks."""
