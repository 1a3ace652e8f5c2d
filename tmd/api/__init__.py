"""The daemon's HTTP interface, JSON both ways, version 1.

Over the unix socket the caller is known by peer credentials: root, the daemon's own user and the configured operators may
do all; another user reads and acts on own jobs only. Over TCP the caller is known by a munge credential for exactly this
request (tmd.api.authentication), and may do the same; whoever shows none is answered by `/v1/health` alone. Agents show theirs
in the hello.
Times are seconds since the Unix epoch. The views are those of `tmd.core.views`, without the job key; records those of
`tmd.core.records`. An error is `{"error": text, "remedy": text}` with 400 (malformed), 403 (not yours), 404 (unknown),
409 (refused in this state) or 503 (decided, but the ledger cannot be written yet).

    GET  /v1/health                       {"ok": true, "generation": 3}; 503 with "ok": false while the ledger cannot be written
    GET  /v1/status                       Status (below)
    GET  /v1/jobs[?limit=50]              {"jobs": [JobView]}: live jobs, then those that ended, newest first
    GET  /v1/jobs/ID                      JobView
    GET  /v1/jobs/ID/cost                 JobCost of tmd.core.costs: what its migrations cost it
    GET  /v1/nodes                        {"nodes": [Node], "manager_error": ""}
    GET  /v1/standbys                     {"standbys": [RankView]}
    GET  /v1/migrations[?job=ID][&limit=100]  {"migrations": [MigrationView]}, newest first
    GET  /v1/migrations/ID[?wait=SECONDS] MigrationView; with `wait` (at most 60) answers when it has ended or the time is up
    GET  /v1/story/ID[?limit=1000]        {"subject": ID, "events": [EventRecord]}, oldest first, with the causes that led to them
    POST /v1/migrations                   {"job", "node" | "rank", "to_node"?, "dry_run"?} -> with dry_run {"explanation": text},
                                          else {"migration_id", "migration": MigrationView}
    POST /v1/migrations/ID/abort          MigrationView
    POST /v1/jobs/ID/cancel               JobView
    POST /v1/jobs/ID/token                {"token"}: for agents of this job over TCP; also before the job exists
    POST /v1/nodes/NODE/drain             {"reason"} -> {"node", "state"}; operators only
    POST /v1/nodes/NODE/resume            {"node", "state"}; operators only
    POST /v1/nodes/NODE/findings          HealthReport (tmd.protocol.health) -> {"findings": [FindingView]} of that node; for
                                          operators, and whoever shows the reporters' token (Authorization: Token TOKEN)
    GET  /v1/findings                     {"findings": [FindingView]} that stand
    POST /v1/findings/token               {"token"}: the reporters'; operators only
    POST /v1/pause, /v1/unpause           {"paused": bool}; operators only
    GET  /v1/agent                        WebSocket of an agent (tmd.protocol.agent)

    Status  {"tmd_version", "protocol": [major, minor], "generation", "pid", "started_s", "now_s", "paused", "observe_only",
             "resource_manager", "agents": connected, "jobs": {state: count}, "sentences": {object id: sentence},
             "now": [{"job", "kind": "job" | "migration" | "node" | "standby", "object", "sentence"}] without what has ended,
             "ledger": {"url", "healthy", "error", "failing_since_s", "writes", "write_median_s", "write_max_s"}}
    Node    {"name", "state": "up" | "draining" | "drained" | "down" | "unknown", "manager_state": "IDLE+DRAIN", "address",
             "labels", "reason", "uses": [NodeView of tmd.core.views, one for each job]}
"""
