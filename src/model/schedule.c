/*
 * See schedule.h. Steps are those of data/README.md: equal ones from t = 1 (noise) to t = 0 (picture), which is
 * FlowMatchEulerDiscreteScheduler with shift 1.
 */
#include "model/schedule.h"

#include "base/json.h"

static int check_switches(const struct json *config, const char *path, pf_error *err)
{
    static const char *const switches[] = {
        "use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas",
        "use_beta_sigmas",      "invert_sigmas",     "stochastic_sampling",
    };
    for (size_t i = 0; i < PF_COUNTOF(switches); i++)
        if (json_bool(json_get(config, switches[i])))
            return err_set(err, PF_E_UNSUPPORTED, "'%s': %s true is not supported", path,
                           switches[i]);
    return PF_OK;
}

int schedule_read(const struct json *config, const char *path, struct schedule *out, pf_error *err)
{
    static const char class_name[] = "FlowMatchEulerDiscreteScheduler";
    struct schedule s = {.n_train_steps = 1000.0};
    if (config != NULL) {
        const char *name = json_z(json_get(config, "_class_name"));
        const struct json *shift = json_get(config, "shift");
        const struct json *n_train = json_get(config, "num_train_timesteps");
        if (name == NULL || !str_eqz(str_of(name), class_name))
            return err_set(err, PF_E_UNSUPPORTED,
                           "'%s': scheduler class '%.128s' is not supported, only '%s'", path,
                           name == NULL ? "" : name, class_name);
        if (json_is_number(shift) && !(json_number(shift) == 1.0))
            return err_set(err, PF_E_UNSUPPORTED, "'%s': shift %g is not supported, only 1", path,
                           json_number(shift));
        if (json_is_number(n_train))
            s.n_train_steps = json_number(n_train);
        if (!(s.n_train_steps >= 1.0 && s.n_train_steps <= 1e6))
            return err_set(err, PF_E_RANGE, "'%s': num_train_timesteps %g is not in 1..1000000",
                           path, s.n_train_steps);
        int rc = check_switches(config, path, err);
        if (rc != PF_OK)
            return rc;
    }
    *out = s;
    return PF_OK;
}

double schedule_time(uint32_t i_step, uint32_t n_steps)
{
    return 1.0 - (double)i_step / (double)n_steps;
}
