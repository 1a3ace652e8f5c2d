/* What a script is to see of its job when some of the nodes stand by: the first nodes only.

   Slurm describes a job's nodes by lists of counts, one for each node, equal neighbours folded: "2(x3),1" is 2,2,2,1. Pure: no
   Slurm, no allocation, no I/O. A function that returns false has found a list that is no such list, one with too few nodes or
   too little room, and what it wrote is then meaningless. */

#ifndef TMD_JOB_VIEW_H
#define TMD_JOB_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How many nodes the user asked for, as job_submit.lua noted it in the job's environment: "2", or "2-4" for -N 2-4.
   `allocated` nodes include `standby` ones. Without a note, or with one that does not fit the allocation: what is left of it. 0 if nothing is. */
uint32_t job_view_nodes(const char *noted, uint32_t allocated, uint32_t standby);

/* The first `nodes` counts of `counts`, as such a list. */
bool job_view_cut(const char *counts, uint32_t nodes, char *out, size_t size);

/* The sum of all counts; 0 if it is no such list, or more than UINT32_MAX. */
uint32_t job_view_total(const char *counts);

/* `tasks` tasks on the first `nodes` nodes, of which each has room for as many as `counts` says: one for each node first, then
   the first nodes are filled, which is Slurm's block distribution. More tasks than room: the last node takes the rest. */
bool job_view_spread(const char *counts, uint32_t nodes, uint32_t tasks, char *out, size_t size);

#endif
