"""Policy: trace, problem, plan, simulator, the daemon, the command line. Knows no frameworks."""
