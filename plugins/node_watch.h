/* Watches the state of all nodes from within slurmctld, and tells the tmd daemon of changes.

   Contract: one thread of its own asks slurmctld as any client would, when slurmctld says that it has changed a node, and sends datagrams
   (node_event.h). It takes no lock of slurmctld's, never waits for the daemon, and outlives every failure: no listener, a full
   socket, slurmctld not answering. What could not be sent is made up for by one "resync" datagram as soon as one gets through. */

#ifndef TMD_NODE_WATCH_H
#define TMD_NODE_WATCH_H

typedef struct node_watch node_watch;

/* Starts to watch, and to send to the unix datagram socket at `path`. `interval_ms`: the least time between two looks at nodes that go
   on changing. Returns NULL and says why in the log if it cannot. */
node_watch *node_watch_start(const char *path, unsigned interval_ms);

/* Tells it to end, and does not wait: slurmctld may hold locks without which the thread's question is not answered.
   `watch` is not to be used any more. The code must stay loaded until the thread has ended (-z nodelete). */
void node_watch_stop(node_watch *watch);

#endif
