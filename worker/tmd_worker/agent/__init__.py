"""The agent, `tmd-run`: one per node. Starts the ranks, watches them, speaks to the daemon; needs neither torch nor numpy.

main: the command line · settings: what it resolves to · directed: the node as the daemon wants it · plain: without a daemon ·
daemon_link: the WebSocket · rank_channel: a rank's control socket · processes, exits, logs, stop_signals: the ranks' processes.
"""
