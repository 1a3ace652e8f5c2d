"""The ledger: what the daemon has decided, durable before it is done. SQLite by default, Postgres by URL."""
