"""The typed, versioned messages between daemon, agent and rank. Needs msgspec alone: neither torch nor SQLAlchemy.

Everything is level-triggered: a rank sends its whole status, the daemon sends the whole of what it wants. Either may be
lost, repeated or overtaken by a newer one without harm, so a restart or a reconnect is just "send it again".
"""
