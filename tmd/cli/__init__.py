"""`tmctl`: what operators and users see of the daemon, and what they can ask of it."""
