/* What stands behind `--standby=`: N[:pool].

   N standby nodes are added to the job's own allocation; with `:pool` nothing is added, and up to N replacements may come from the
   shared pool. 0 takes a `#SBATCH --standby` back. Pure: no Slurm, no allocation, no I/O. */

#ifndef TMD_STANDBY_FLAG_H
#define TMD_STANDBY_FLAG_H

#include <stdbool.h>

enum { TMD_MAX_STANDBY = 1024 };

typedef struct {
    unsigned count; /* 0: no standby */
    bool pool;
} standby_flag;

/* Reads `text` into `flag`. Returns NULL, or what is wrong with it, to be read after "--standby=TEXT: ". */
const char *standby_flag_parse(const char *text, standby_flag *flag);

#endif
