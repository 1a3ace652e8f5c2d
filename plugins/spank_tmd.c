/* spank_tmd: the option --standby=N[:pool] of sbatch, salloc and srun.

   1. Where a job is submitted: reads and checks the option, hands it to slurmctld (in the job's control environment, where job_submit.lua
      and job_submit/tmd find it) and to the job (in its environment): TMD_STANDBY=N, or TMD_STANDBY_POOL=N for N:pool.
   2. In the batch step: the allocation has the standby nodes as well. The script and its `srun` are to see what the user asked for, so
      SLURM_JOB_NUM_NODES and all that goes with it are lowered to the first nodes; what is true is in TMD_ALLOC_*.

   Contract: a job without the option is not touched, and neither is one whose environment is not understood: the log of slurmd
   says why. No function here fails a step. Public headers only. A symbol that is missing would kill every batch step: linked with -z now. */

#include "job_view.h"
#include "standby_flag.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

#pragma GCC visibility push(default)
SPANK_PLUGIN(tmd, 1);
#pragma GCC visibility pop

/* A list of some thousand nodes, folded, is a few hundred bytes. */
enum { VALUE_BYTES = 64 * 1024 };

/* Slurm's own way to hand the option on from salloc or the batch step: whoever sees it takes it for its own. */
#define HANDED_ON "SLURM_SPANK__SLURM_SPANK_OPTION_tmd_standby"

/* What this plugin, job_submit.lua or Slurm on behalf of the option leave in the environment of a job with standby nodes, and a job that
   is submitted from within would inherit; with a value: only if it is this one, as the user may have set another. */
static const struct {
    const char *name, *value;
} OF_THE_OUTER_JOB[] = {
    { "TMD_STANDBY", NULL },
    { "TMD_STANDBY_POOL", NULL },
    { "TMD_STANDBY_NODELIST", NULL },
    { "TMD_NNODES", NULL },
    { "TMD_NODES_ASKED", NULL },
    { "TMD_NTASKS", NULL },
    { "TMD_ALLOC_NODES", NULL },
    { "TMD_ALLOC_NODELIST", NULL },
    { "TMD_ALLOC_CPUS_PER_NODE", NULL },
    { "TMD_ALLOC_TASKS_PER_NODE", NULL },
    { "_SLURM_SPANK_OPTION_tmd_standby", NULL },
    { "SLURM_SPANK_TMD_STANDBY", NULL },
    { "SLURM_SPANK_TMD_STANDBY_POOL", NULL },
    { "SLURM_NO_KILL", "set" },
    { "SLURM_KILL_BAD_EXIT", "0" },
    { "SLURM_WAIT", "0" },
};
enum { OUTER_COUNT = sizeof OF_THE_OUTER_JOB / sizeof OF_THE_OUTER_JOB[0] };

static standby_flag flag; /* as given, count 0 without the option */

/* An error here is the only one that ends sbatch, salloc or srun also where plugstack.conf says "optional". */
static int on_standby(int value, const char *text, int remote)
{
    (void)value;
    const char *wrong = standby_flag_parse(text, &flag);
    if (wrong == NULL && spank_context() == S_CTX_LOCAL)
        wrong = "an option of sbatch and salloc: the standby nodes of a job are set when it is submitted, srun would start ranks on them";
    if (wrong == NULL)
        return 0;
    if (!remote)
        slurm_error("--standby=%s: %s", text ? text : "", wrong);
    return -1;
}

static void forget_outer_job(void)
{
    bool has_standby = getenv("TMD_STANDBY") != NULL || getenv("TMD_STANDBY_POOL") != NULL;
    if (getenv("SLURM_JOB_ID") == NULL || !has_standby)
        return;
    for (size_t i = 0; i < OUTER_COUNT; i++) {
        const char *name = OF_THE_OUTER_JOB[i].name, *ours = OF_THE_OUTER_JOB[i].value, *value = getenv(name);
        if (value != NULL && (ours == NULL || strcmp(value, ours) == 0))
            unsetenv(name);
    }
}

EXPORTED int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    static struct spank_option option = {
        .name = "standby",
        .arginfo = "N[:pool]",
        .usage = "keep N nodes on standby: tmd moves ranks onto them when a node has to go or fails. "
                 "They come on top of --nodes; with :pool they are taken from the shared pool",
        .has_arg = 1,
        .cb = on_standby,
    };
    if (spank_context() == S_CTX_ALLOCATOR) /* sbatch, salloc: a new job */
        forget_outer_job();
    unsetenv(HANDED_ON);
    return spank_option_register(spank, &option) == ESPANK_SUCCESS ? 0 : -1;
}

/* As what the flag is handed on. */
static const char *flag_name(void)
{
    return flag.pool ? "TMD_STANDBY_POOL" : "TMD_STANDBY";
}

EXPORTED int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    char text[32];
    if (flag.count == 0 || spank_context() != S_CTX_ALLOCATOR)
        return 0;
    snprintf(text, sizeof text, "%u", flag.count);
    spank_job_control_setenv(spank, flag_name(), text, 1);
    setenv(flag_name(), text, 1);
    return 0;
}

/* ---------------------------------------------------------------- in the batch step */

static bool read_value(spank_t spank, const char *name, char value[VALUE_BYTES])
{
    return spank_getenv(spank, name, value, VALUE_BYTES) == ESPANK_SUCCESS;
}

static uint32_t read_count(spank_t spank, const char *name)
{
    char text[32];
    return spank_getenv(spank, name, text, sizeof text) == ESPANK_SUCCESS ? (uint32_t)strtoul(text, NULL, 10) : 0;
}

static void write_count(spank_t spank, const char *name, uint32_t count)
{
    char text[32];
    snprintf(text, sizeof text, "%u", count);
    spank_setenv(spank, name, text, 1);
}

/* Only where Slurm has set it, and the new one is known. */
static void replace_count(spank_t spank, const char *name, uint32_t count)
{
    if (count > 0 && read_count(spank, name) > 0)
        write_count(spank, name, count);
}

/* The first `nodes` of `all`, and the others. */
static bool split_nodes(const char *all, uint32_t nodes, char first[VALUE_BYTES], char others[VALUE_BYTES])
{
    /* By its tag: hostlist_t is this pointer in older versions, and what it points to since 23.11. */
    struct hostlist *rest = slurm_hostlist_create(all), *taken = slurm_hostlist_create(NULL);
    bool done = rest != NULL && taken != NULL;
    for (uint32_t i = 0; done && i < nodes; i++) {
        char *name = slurm_hostlist_shift(rest);
        done = name != NULL && slurm_hostlist_push_host(taken, name) > 0;
        free(name);
    }
    done = done && slurm_hostlist_ranged_string(taken, VALUE_BYTES, first) > 0 && slurm_hostlist_ranged_string(rest, VALUE_BYTES, others) > 0;
    if (taken != NULL)
        slurm_hostlist_destroy(taken);
    if (rest != NULL)
        slurm_hostlist_destroy(rest);
    return done;
}

/* What the batch step's environment says of the whole allocation, and what it is to say. */
typedef struct {
    uint32_t all, nodes;
    uint32_t tasks; /* 0: neither the user nor Slurm gave a number of them */
    char all_nodes[VALUE_BYTES], all_cpus[VALUE_BYTES], all_tasks[VALUE_BYTES];
    char first_nodes[VALUE_BYTES], other_nodes[VALUE_BYTES], cpus[VALUE_BYTES], tasks_per_node[VALUE_BYTES];
} batch_view;

static bool understand(spank_t spank, batch_view *view)
{
    char noted[32];
    bool is_noted = spank_getenv(spank, "TMD_NODES_ASKED", noted, sizeof noted) == ESPANK_SUCCESS;
    view->all = read_count(spank, "SLURM_JOB_NUM_NODES");
    view->nodes = job_view_nodes(is_noted ? noted : NULL, view->all, flag.count);
    view->tasks = read_count(spank, "TMD_NTASKS");
    if (view->nodes == 0 || view->nodes >= view->all)
        return false;
    if (!read_value(spank, "SLURM_JOB_NODELIST", view->all_nodes) || !read_value(spank, "SLURM_JOB_CPUS_PER_NODE", view->all_cpus)
        || !read_value(spank, "SLURM_TASKS_PER_NODE", view->all_tasks))
        return false;
    bool spread = view->tasks > 0 ? job_view_spread(view->all_tasks, view->nodes, view->tasks, view->tasks_per_node, VALUE_BYTES)
                                  : job_view_cut(view->all_tasks, view->nodes, view->tasks_per_node, VALUE_BYTES);
    if (view->tasks == 0 && read_count(spank, "SLURM_NTASKS") == job_view_total(view->all_tasks))
        view->tasks = job_view_total(view->tasks_per_node); /* Slurm's own: so many for each node */
    return spread && job_view_cut(view->all_cpus, view->nodes, view->cpus, VALUE_BYTES)
        && split_nodes(view->all_nodes, view->nodes, view->first_nodes, view->other_nodes);
}

static void show(spank_t spank, const batch_view *view)
{
    write_count(spank, "TMD_ALLOC_NODES", view->all);
    spank_setenv(spank, "TMD_ALLOC_NODELIST", view->all_nodes, 1);
    spank_setenv(spank, "TMD_ALLOC_CPUS_PER_NODE", view->all_cpus, 1);
    spank_setenv(spank, "TMD_ALLOC_TASKS_PER_NODE", view->all_tasks, 1);
    spank_setenv(spank, "TMD_STANDBY_NODELIST", view->other_nodes, 1);
    write_count(spank, "TMD_NNODES", view->nodes);
    write_count(spank, "SLURM_JOB_NUM_NODES", view->nodes);
    write_count(spank, "SLURM_NNODES", view->nodes);
    spank_setenv(spank, "SLURM_JOB_NODELIST", view->first_nodes, 1);
    spank_setenv(spank, "SLURM_NODELIST", view->first_nodes, 1);
    spank_setenv(spank, "SLURM_JOB_CPUS_PER_NODE", view->cpus, 1);
    spank_setenv(spank, "SLURM_TASKS_PER_NODE", view->tasks_per_node, 1);
    replace_count(spank, "SLURM_NTASKS", view->tasks);
    replace_count(spank, "SLURM_NPROCS", view->tasks);
}

/* `srun` in the script lives on when a node is lost, as the job does: what the user has set himself stays. */
static void let_steps_live_on(spank_t spank)
{
    spank_setenv(spank, "SLURM_NO_KILL", "set", 0);
    spank_setenv(spank, "SLURM_KILL_BAD_EXIT", "0", 0);
    spank_setenv(spank, "SLURM_WAIT", "0", 0);
}

static void lower(spank_t spank)
{
    batch_view *view = calloc(1, sizeof *view);
    if (view != NULL && understand(spank, view))
        show(spank, view);
    else
        slurm_info("tmd: job with standby nodes: its script sees the whole allocation (%u nodes)", view != NULL ? view->all : 0);
    free(view);
}

/* Slurm does not hand options on with --export=NONE. What job_submit.lua has put into the job's environment comes through. */
static void find_flag(spank_t spank)
{
    char noted[32];
    if (flag.count > 0 || spank_getenv(spank, "TMD_NODES_ASKED", noted, sizeof noted) != ESPANK_SUCCESS)
        return;
    flag.count = read_count(spank, "TMD_STANDBY");
    flag.pool = flag.count == 0;
    if (flag.pool)
        flag.count = read_count(spank, "TMD_STANDBY_POOL");
}

EXPORTED int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    uint32_t step = 0;
    if (!spank_remote(spank) || spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step != SLURM_BATCH_SCRIPT)
        return 0;
    find_flag(spank);
    if (flag.count == 0)
        return 0;
    write_count(spank, flag_name(), flag.count);
    spank_unsetenv(spank, HANDED_ON);
    spank_unsetenv(spank, flag.pool ? "SLURM_SPANK_TMD_STANDBY_POOL" : "SLURM_SPANK_TMD_STANDBY");
    if (!flag.pool)
        lower(spank);
    let_steps_live_on(spank);
    return 0;
}
