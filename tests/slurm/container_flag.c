/* For tests: the options that Pyxis adds to srun, as far as a step can tell. No container is made; a task finds what it was given in
   TEST_CONTAINER_IMAGE and TEST_CONTAINER_MOUNTS. */

#include <slurm/spank.h>
#include <stdio.h>

SPANK_PLUGIN(container_flag, 1);

static char image[1024], mounts[1024];

static int on_image(int value, const char *text, int remote)
{
    (void)value, (void)remote;
    snprintf(image, sizeof image, "%s", text);
    return 0;
}

static int on_mounts(int value, const char *text, int remote)
{
    (void)value, (void)remote;
    snprintf(mounts, sizeof mounts, "%s", text);
    return 0;
}

static struct spank_option options[] = {
    { "container-image", "IMAGE", "the image to run in", 1, 0, on_image },
    { "container-mounts", "SRC:DST", "what to mount", 1, 0, on_mounts },
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    if (image[0] != '\0')
        spank_setenv(spank, "TEST_CONTAINER_IMAGE", image, 1);
    if (mounts[0] != '\0')
        spank_setenv(spank, "TEST_CONTAINER_MOUNTS", mounts, 1);
    return 0;
}
