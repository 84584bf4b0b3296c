/*
 * The end of a measurement. A part of one says nothing, so that an interruption leaves no result.
 */
#include "cli/measure.h"

int measure_end(const struct out *o, int rc, struct json *result, measure_print_fn print,
                const pf_error *err)
{
    if (rc == PF_E_CANCELLED)
        return out_interrupted(o, "interrupted: what was measured so far is lost");
    if (rc)
        return out_fail(o, err);
    if (o->is_json)
        return out_json(o, result);
    print(result, stdout);
    json_free(result);
    return EXIT_STATUS_OK;
}
