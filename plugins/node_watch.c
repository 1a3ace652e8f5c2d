/* See node_watch.h. */

#include "node_watch.h"

#include "node_event.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h> /* slurm_info, slurm_error */
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
    TICK_MS = 10,
    /* Nodes are looked at this often although nothing seems to have changed. */
    QUIET_INTERVAL_MS = 1000,
    /* slurmctld may write a change down under the second in which it began to make it. */
    SETTLE_S = 2,
    /* With thousands of nodes a look costs slurmctld tens of milliseconds: then they follow each other less closely. */
    PAUSE_PER_LOOK = 3,
    LONGEST_PAUSE_MS = 100,
    /* While slurmctld does not answer, it is asked less and less often, but at least this often. */
    LONGEST_INTERVAL_MS = 2000,
};

struct node_watch {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;
    unsigned owners; /* the thread and whoever started it: the last one frees */

    /* The rest is the thread's own. */
    struct sockaddr_un to;
    int fd;
    unsigned interval_ms;
    /* In which second slurmctld changed a node last, as it keeps it for itself. NULL: this version does not show it. */
    const volatile time_t *changed_s;
    time_t seen_change_s;   /* its value before the last look */
    time_t looked_s;        /* when that began, by the same clock */
    struct timespec done;   /* when it ended, and how long it took */
    unsigned took_ms;
    unsigned retry_ms;      /* from a look without an answer to the next one; 0: there was one */
    node_info_msg_t *known; /* as of the last answer, NULL before the first */
    bool resync;            /* one is due */
    uint64_t lost;          /* datagrams since the last one that got through */
};

static void release(node_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    bool last = --watch->owners == 0;
    pthread_mutex_unlock(&watch->lock);
    if (!last)
        return;
    if (watch->known != NULL)
        slurm_free_node_info_msg(watch->known);
    if (watch->fd >= 0)
        close(watch->fd);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}

/* False once it is to stop. */
static bool pause_for(node_watch *watch, unsigned ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&watch->lock);
    while (!watch->stopping && pthread_cond_timedwait(&watch->changed, &watch->lock, &until) != ETIMEDOUT)
        ;
    bool go_on = !watch->stopping;
    pthread_mutex_unlock(&watch->lock);
    return go_on;
}

static unsigned ms_since(struct timespec then)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (unsigned)((at.tv_sec - then.tv_sec) * 1000 + (at.tv_nsec - then.tv_nsec) / 1000000);
}

static struct timespec now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return at;
}

static bool send_datagram(const node_watch *watch, const char *text, size_t bytes)
{
    ssize_t sent = sendto(watch->fd, text, bytes, MSG_DONTWAIT | MSG_NOSIGNAL, (const struct sockaddr *)&watch->to, sizeof watch->to);
    return sent == (ssize_t)bytes;
}

/* Tries to say that something was missed, if something was. Returns whether the receiver is up to date. */
static bool catch_up(node_watch *watch)
{
    char text[TMD_EVENT_MAX_BYTES];
    if (watch->resync && send_datagram(watch, text, node_event_format_resync(text, watch->lost, now()))) {
        watch->resync = false;
        watch->lost = 0;
    }
    return !watch->resync;
}

static void tell(node_watch *watch, const node_view *node)
{
    char text[TMD_EVENT_MAX_BYTES];
    if (catch_up(watch) && send_datagram(watch, text, node_event_format(text, node, now())))
        return;
    watch->resync = true;
    watch->lost++;
}

static node_view view(const node_info_t *node)
{
    return (node_view){ .name = node->name, .state = node->node_state, .reason = node->reason };
}

/* Whether both answers are about the same nodes, in the same order. Slots of nodes that were removed have no name. */
static bool same_nodes(const node_info_msg_t *one, const node_info_msg_t *other)
{
    if (one->record_count != other->record_count)
        return false;
    for (uint32_t i = 0; i < one->record_count; i++) {
        const char *name = one->node_array[i].name, *twin = other->node_array[i].name;
        if (strcmp(name ? name : "", twin ? twin : "") != 0)
            return false;
    }
    return true;
}

/* Takes over `answer`. */
static void compare(node_watch *watch, node_info_msg_t *answer)
{
    node_info_msg_t *before = watch->known;
    watch->known = answer;
    if (before == NULL || !same_nodes(before, answer))
        watch->resync = true; /* begun, or nodes were added or removed */
    else
        for (uint32_t i = 0; i < answer->record_count; i++) {
            node_view old = view(&before->node_array[i]), new = view(&answer->node_array[i]);
            if (new.name != NULL && node_event_matters(&old, &new))
                tell(watch, &new);
        }
    if (before != NULL)
        slurm_free_node_info_msg(before);
}

/* One question to slurmctld. Returns whether it answered. */
static bool look(node_watch *watch)
{
    node_info_msg_t *answer = NULL;
    time_t since = watch->known != NULL ? watch->known->last_update : 0;
    if (slurm_load_node(since, &answer, SHOW_ALL) == SLURM_SUCCESS && answer != NULL)
        compare(watch, answer);
    else if (errno != SLURM_NO_CHANGE_IN_DATA)
        return false;
    catch_up(watch);
    return true;
}

static unsigned least_pause_ms(const node_watch *watch)
{
    unsigned pause_ms = watch->took_ms * PAUSE_PER_LOOK;
    if (pause_ms > LONGEST_PAUSE_MS)
        pause_ms = LONGEST_PAUSE_MS;
    return pause_ms > watch->interval_ms ? pause_ms : watch->interval_ms;
}

/* Looking costs slurmctld much, even if nothing has changed; reading when it last changed a node costs nothing. The first change in a
   second is looked at without delay, those that follow in the same second at the interval. */
static bool is_due(const node_watch *watch)
{
    unsigned since_ms = ms_since(watch->done);
    if (watch->retry_ms != 0)
        return since_ms >= watch->retry_ms;
    if (watch->known == NULL)
        return true;
    if (watch->changed_s == NULL)
        return since_ms >= watch->interval_ms;
    unsigned pause_ms = least_pause_ms(watch);
    time_t changed_s = *watch->changed_s;
    if (changed_s != watch->seen_change_s || (since_ms >= QUIET_INTERVAL_MS && since_ms >= pause_ms))
        return true;
    return since_ms >= pause_ms && watch->looked_s - changed_s < SETTLE_S;
}

static void timed_look(node_watch *watch)
{
    struct timespec begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    watch->looked_s = time(NULL);
    watch->seen_change_s = watch->changed_s != NULL ? *watch->changed_s : 0;
    bool answered = look(watch);
    watch->took_ms = ms_since(begun);
    clock_gettime(CLOCK_MONOTONIC, &watch->done);
    unsigned retry_ms = watch->retry_ms != 0 ? watch->retry_ms * 2 : watch->interval_ms;
    watch->retry_ms = answered ? 0 : retry_ms < LONGEST_INTERVAL_MS ? retry_ms : LONGEST_INTERVAL_MS;
}

static void *run(void *argument)
{
    node_watch *watch = argument;
    prctl(PR_SET_NAME, "tmd_watch");
    while (pause_for(watch, TICK_MS))
        if (is_due(watch))
            timed_look(watch);
    release(watch);
    return NULL;
}

/* slurmctld's signals are for slurmctld's threads. */
static int start_thread(node_watch *watch)
{
    pthread_t thread;
    pthread_attr_t detached;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &detached, run, watch);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return error;
}

node_watch *node_watch_start(const char *path, unsigned interval_ms)
{
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof to.sun_path) {
        slurm_error("job_submit/tmd: no node events: a socket's path may have %zu bytes, this one is longer: %s", sizeof to.sun_path - 1, path);
        return NULL;
    }
    strcpy(to.sun_path, path);
    node_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL)
        return NULL;
    /* Slurm's plugins are linked against what slurmctld exports; looked up by name it needs no private header. */
    const time_t *changed_s = dlsym(RTLD_DEFAULT, "last_node_update");
    *watch = (node_watch){ .to = to, .interval_ms = interval_ms, .changed_s = changed_s, .owners = 2 };
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&watch->lock, NULL);
    pthread_cond_init(&watch->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    watch->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int error = watch->fd < 0 ? errno : start_thread(watch);
    if (error == 0)
        return watch;
    slurm_error("job_submit/tmd: no node events: %s", strerror(error));
    watch->owners = 1;
    release(watch);
    return NULL;
}

void node_watch_stop(node_watch *watch)
{
    pthread_mutex_lock(&watch->lock);
    watch->stopping = true;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    release(watch);
}
