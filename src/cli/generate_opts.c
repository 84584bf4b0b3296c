/*
 * The option table of `pageflip generate`, and the rules between its options.
 */
#include "cli/generate_opts.h"

#include <string.h>

#define PICTURE(field) offsetof(struct generate_args, picture.field)
#define SERVING(field) offsetof(struct generate_args, serving.field)
#define DELAY_S_MAX    86400.0 /* a day */

const struct opt generate_opts[N_GENERATE_OPTS] = {
    {"lora", 'l', OPT_LORA, "L",
     "adapter: PATH[:STRENGTH][,alpha=A][,target=COMPONENT], or the name of a "
     "bundled one; may be repeated",
     PICTURE(loras), NULL, 0, 0, false},
    {"prompt", 0, OPT_STRING, "TEXT", "draw the class that these words name", PICTURE(prompt), NULL,
     0, 0, false},
    {"class", 'c', OPT_INT, "I", "draw the class of this number", PICTURE(class), NULL, 0,
     UINT32_MAX, false},
    {"grid", 0, OPT_FLAG, NULL, "draw every class once, as a contact sheet", PICTURE(grid), NULL, 0,
     0, false},
    {"n", 'n', OPT_INT, "N",
     "pictures of the class, as a sheet when there are several; 1 unless said", PICTURE(n), NULL, 1,
     4096, false},
    {"seed", 's', OPT_INT, "S", "seed of the starting noise; 0 unless said", PICTURE(seed), NULL, 0,
     0, false},
    {"steps", 0, OPT_INT, "N", "sampling steps; 16 unless said", PICTURE(steps), NULL, 1, 10000,
     false},
    {"guidance-scale", 'g', OPT_REAL, "G", "classifier-free guidance; 2 unless said, 1 for none",
     PICTURE(guidance), NULL, 0, 0, false},
    {"output", 'o', OPT_FILE, "FILE",
     "the PNG to write; named after what is drawn and the seed unless said", PICTURE(output), NULL,
     0, 0, false},
    {"zoom", 0, OPT_INT, "Z", "enlarge the pictures of a sheet Z times", PICTURE(zoom), NULL, 1, 64,
     false},
    {"batch", 0, OPT_INT, "N",
     "pictures that share a pass; changes no picture, only memory and time", PICTURE(batch), NULL,
     1, 4096, false},
    {"allow-unmatched", 0, OPT_FLAG, NULL, "leave out keys that match no tensor of the model",
     PICTURE(allow_unmatched), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "precision of the merge: base (the default) or f32",
     PICTURE(merge_dtype), "base|f32", 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads; one per usable CPU unless said", PICTURE(threads),
     NULL, 1, 256, false},
    /* N_PICTURE_OPTS end here */
    {"model", 'm', OPT_MODEL, "M", "model directory; the bundled model unless said",
     offsetof(struct generate_args, model), NULL, 0, 0, false},
    {"script", 0, OPT_FILE, "FILE",
     "run the lines of FILE (- for standard input): set, merge, unmerge, generate, ...",
     offsetof(struct generate_args, script), NULL, 0, 0, false},
    {"keep-going", 'k', OPT_FLAG, NULL, "with --script: a line that fails does not end the script",
     offsetof(struct generate_args, keep_going), NULL, 0, 0, false},
    {"way", 0, OPT_CHOICE, "W",
     "how adapters are applied: auto, overlay, stream or inplace; the same bytes", SERVING(way),
     "auto|overlay|stream|inplace", 0, 0, false},
    {"cache-dir", 0, OPT_FILE, "DIR",
     "where merged tensors are cached, or off; $PAGEFLIP_CACHE unless said", SERVING(cache_dir),
     NULL, 0, 0, false},
    {"cache-budget", 0, OPT_SIZE, "SIZE",
     "the most that the cache may hold; a quarter of the free space unless said",
     SERVING(cache_budget), NULL, 0, 0, false},
    {"host-memory", 0, OPT_SIZE, "SIZE",
     "the most host memory for weights; what the system leaves unless said", SERVING(host_memory),
     NULL, 0, 0, false},
    {"resident", 0, OPT_INT, "N", "keep private copies of the first N layers; none unless said",
     SERVING(resident), NULL, 0, 65536, false},
    {"build-delay", 0, OPT_REAL, "S",
     "with --script: seconds until a composition that lasts is cached; 2 unless said",
     SERVING(build_delay), NULL, 0, 0, false},
};

const struct command script_generate = {
    .name = "generate",
    .opts = generate_opts,
    .n_opts = N_PICTURE_OPTS,
    .args_bytes = sizeof(struct generate_args),
};

const char *picture_check(const struct picture_args *picture)
{
    int n_what = (picture->prompt != NULL) + picture->class.is_set + picture->grid;

    if (n_what == 0)
        return "nothing to draw: give --prompt TEXT, --class I or --grid";
    if (n_what > 1)
        return "give only one of --prompt, --class and --grid";
    if (picture->grid && picture->n.is_set)
        return "option '--n' does not go with --grid, which draws every class once";
    if (picture->guidance.is_set && picture->guidance.v <= 0)
        return "option '--guidance-scale' must be above 0; 1 means no guidance";
    return NULL;
}

static bool draws(const struct picture_args *picture)
{
    return picture->prompt || picture->output || picture->class.is_set || picture->n.is_set ||
           picture->seed.is_set || picture->steps.is_set || picture->zoom.is_set ||
           picture->batch.is_set || picture->guidance.is_set || picture->grid;
}

const char *generate_check(const struct generate_args *args)
{
    const struct serving_args *serving = &args->serving;

    if (serving->way && !strcmp(serving->way, "inplace") &&
        !(serving->resident.is_set && serving->resident.v))
        return "option '--way inplace' rewrites resident layers: say how many with --resident N";
    if (args->script) {
        if (draws(&args->picture))
            return "option '--script' takes its pictures from the script: say on a 'generate' line "
                   "what to draw";
        return build_delay_check(&serving->build_delay);
    }
    if (args->keep_going)
        return "option '--keep-going' goes with --script only";
    if (serving->build_delay.is_set)
        return "option '--build-delay' goes with --script only: one picture is over sooner";
    return picture_check(&args->picture);
}

const char *build_delay_check(const struct arg_real *delay)
{
    return delay->is_set && (delay->v < 0 || delay->v > DELAY_S_MAX)
               ? "option '--build-delay' takes seconds from 0 to 86400"
               : NULL;
}

int64_t build_delay_ms(const struct arg_real *delay)
{
    const int64_t ms = (int64_t)(delay->v * 1000);

    return !delay->is_set ? 0 : ms ? ms : 1; /* 0 would be the default */
}

int32_t way_by_name(const char *name)
{
    static const struct {
        const char *name;
        int32_t way;
    } ways[] = {
        {"overlay", PF_WAY_OVERLAY}, {"stream", PF_WAY_STREAM}, {"inplace", PF_WAY_INPLACE}};

    for (size_t i = 0; name && i < PF_COUNTOF(ways); i++)
        if (!strcmp(name, ways[i].name))
            return ways[i].way;
    return PF_WAY_AUTO;
}

int32_t merge_dtype_by_name(const char *name)
{
    return name && !strcmp(name, "f32") ? PF_MERGE_F32 : PF_MERGE_BASE;
}
