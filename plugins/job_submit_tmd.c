/* job_submit/tmd: what tmd needs within slurmctld and lua cannot do. JobSubmitPlugins=lua,tmd: lua first.

   1. A job for which job_submit.lua has noted standby nodes survives the loss of a node (--no-kill). A job with --standby that lua
      has not dealt with is refused, rather than run without the nodes that it was promised.
   2. Changes of the nodes' state are told to the tmd daemon (node_watch.h).

   Contract: built with Slurm's public headers alone. Never blocks slurmctld, changes no job without standby nodes.

   Environment of slurmctld: TMD_EVENTS_SOCKET (the daemon's `hint_socket`; default /run/tmd/hints.sock; empty: no events), TMD_EVENTS_INTERVAL_MS (default 50). */

#include "node_watch.h"

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h> /* slurm_info, slurm_error */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define DEFAULT_SOCKET "/run/tmd/hints.sock"
enum { DEFAULT_INTERVAL_MS = 50, LEAST_INTERVAL_MS = 10, MOST_INTERVAL_MS = 60000 };

EXPORTED const char plugin_name[] = "tmd: standby jobs and node events";
EXPORTED const char plugin_type[] = "job_submit/tmd";
EXPORTED const uint32_t plugin_version = SLURM_VERSION_NUMBER;

EXPORTED int init(void);
EXPORTED int fini(void);
EXPORTED int job_submit(job_desc_msg_t *job, uint32_t submit_uid, char **message);
EXPORTED int job_modify(job_desc_msg_t *change, void *job, uint32_t submit_uid, char **message);

static node_watch *watch;

static unsigned interval_ms(void)
{
    const char *given = getenv("TMD_EVENTS_INTERVAL_MS");
    if (given == NULL)
        return DEFAULT_INTERVAL_MS;
    char *end;
    long ms = strtol(given, &end, 10);
    if (*end == '\0' && ms >= LEAST_INTERVAL_MS && ms <= MOST_INTERVAL_MS)
        return (unsigned)ms;
    slurm_error("job_submit/tmd: TMD_EVENTS_INTERVAL_MS=%s: expected %d to %d; %d is used", given, LEAST_INTERVAL_MS, MOST_INTERVAL_MS,
        DEFAULT_INTERVAL_MS);
    return DEFAULT_INTERVAL_MS;
}

int init(void)
{
    const char *given = getenv("TMD_EVENTS_SOCKET");
    const char *path = given != NULL ? given : DEFAULT_SOCKET;
    if (*path != '\0')
        watch = node_watch_start(path, interval_ms());
    slurm_info("job_submit/tmd: loaded, node events %s%s", watch != NULL ? "go to " : "are off", watch != NULL ? path : "");
    return SLURM_SUCCESS;
}

/* Called when JobSubmitPlugins changes; some versions of Slurm also call it at the end. */
int fini(void)
{
    if (watch != NULL)
        node_watch_stop(watch);
    watch = NULL;
    return SLURM_SUCCESS;
}

/* TMD_STANDBY or TMD_STANDBY_POOL, put there by spank_tmd.c. */
static bool has_flag(const job_desc_msg_t *job)
{
    for (uint32_t i = 0; job->spank_job_env != NULL && i < job->spank_job_env_size; i++)
        if (job->spank_job_env[i] != NULL && strncmp(job->spank_job_env[i], "TMD_STANDBY", strlen("TMD_STANDBY")) == 0)
            return true;
    return false;
}

int job_submit(job_desc_msg_t *job, uint32_t submit_uid, char **message)
{
    /* A text in *message would have to come from Slurm's own allocator, which is not public. */
    (void)message;
    if (job->admin_comment != NULL && strstr(job->admin_comment, "tmd:standby=") != NULL) {
        job->kill_on_node_fail = 0;
        return SLURM_SUCCESS;
    }
    if (!has_flag(job))
        return SLURM_SUCCESS;
    slurm_error("job_submit/tmd: job of uid %u refused: it asks for --standby, and no job_submit.lua has dealt with that. "
                "Let it call tmd_standby.lua, and have JobSubmitPlugins=lua,tmd in this order",
        submit_uid);
    return ESLURM_NOT_SUPPORTED;
}

int job_modify(job_desc_msg_t *change, void *job, uint32_t submit_uid, char **message)
{
    (void)change, (void)job, (void)submit_uid, (void)message;
    return SLURM_SUCCESS;
}
