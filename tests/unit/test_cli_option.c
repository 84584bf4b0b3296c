/*
 * Option tables: every type of value, every mistake, and the sentences that the user gets.
 */
#include "testing.h"

#include <string.h>

#include "base/mem.h"
#include "cli/option.h"

struct args {
    struct common_args common;
    const char *model, *dtype, *path;
    struct arg_list loras;
    struct arg_int n, seed, memory;
    struct arg_real scale;
    struct arg_part part;
    bool force;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M", "a model", offsetof(struct args, model), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "a dtype", offsetof(struct args, dtype), "base|f32", 0, 0,
     false},
    {"lora", 'l', OPT_LORA, "L", "an adapter", offsetof(struct args, loras), NULL, 0, 0, false},
    {"number", 'n', OPT_INT, "N", "a number", offsetof(struct args, n), NULL, 1, 64, true},
    {"seed", 0, OPT_INT, "S", "a seed", offsetof(struct args, seed), NULL, 0, 0, false},
    {"scale", 0, OPT_REAL, "X", "a scale", offsetof(struct args, scale), NULL, 0, 0, false},
    {"memory", 0, OPT_SIZE, "SIZE", "a size", offsetof(struct args, memory), NULL, 0, 0, false},
    {"part", 0, OPT_PART, "I/N", "a part", offsetof(struct args, part), NULL, 0, 0, false},
    {"force", 'f', OPT_FLAG, NULL, "by force", offsetof(struct args, force), NULL, 0, 0, false},
};
static const struct operand operands[] = {
    {"PATH", "a file", OPT_FILE, offsetof(struct args, path), true},
};
static const struct command cmd = {
    .name = "test",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .operands = operands,
    .n_operands = PF_COUNTOF(operands),
    .args_bytes = sizeof(struct args),
};

#define N_WORDS_MAX 32

/* Splits line at blanks ("~" is an empty word) and parses it. The words must outlive args. */
static int parse(char *line, struct args *args, pf_error *err)
{
    char *argv[N_WORDS_MAX] = {line};
    int argc = 1;

    *args = (struct args){0};
    *err = (pf_error){0};
    for (char *p = line; (p = strchr(p, ' ')) && argc + 1 < N_WORDS_MAX;) {
        *p++ = 0;
        argv[argc++] = *p == '~' ? p + 1 : p;
    }
    return args_parse(&cmd, argc, argv, args, err);
}

static void fills_every_type(void **state)
{
    char line[] =
        "test -m M --merge-dtype f32 -l a:1 --lora=b file --number 64 --seed 18446744073709551615 "
        "--scale -0.5 --part 2/3";
    char flags[] = "test -fn1 x --json -q";
    struct args args;
    pf_error err;

    (void)state;
    assert_int_equal(parse(line, &args, &err), PF_OK);
    assert_string_equal(args.model, "M");
    assert_string_equal(args.dtype, "f32");
    assert_int_equal(args.loras.n, 2);
    assert_string_equal(args.loras.v[0], "a:1");
    assert_string_equal(args.loras.v[1], "b");
    assert_string_equal(args.path, "file");
    assert_true(args.n.is_set && args.n.v == 64);
    assert_true(args.seed.v == UINT64_MAX);
    assert_true(args.scale.is_set && args.scale.v == -0.5);
    assert_true(args.part.i == 2 && args.part.n == 3);
    assert_false(args.force || args.common.json);
    args_release(&cmd, &args);
    assert_int_equal(parse(flags, &args, &err), PF_OK);
    assert_true(args.force && args.common.json && args.common.quiet && !args.common.help);
    assert_true(args.n.v == 1 && !args.seed.is_set);
    args_release(&cmd, &args);
}

static void names_every_mistake(void **state)
{
    static const struct {
        const char *line, *msg;
    } bad[] = {
        {"test x", "option '--number' is missing: a number"},
        {"test -n 1", "PATH is missing: a file"},
        {"test -n 1 a b", "'b' is one argument too many"},
        {"test -n 1 ~", "PATH is an empty text"},
        {"test -n 0 x", "option '--number' takes a whole number from 1 to 64, not '0'"},
        {"test -n 65 x", "not '65'"},
        {"test -n -1 x", "not '-1'"},
        {"test -n 1.5 x", "not '1.5'"},
        {"test -n 1 --seed 18446744073709551616 x",
         "option '--seed' takes a whole number, not '184"},
        {"test -n 1 --scale nan x", "option '--scale' takes a number, not 'nan'"},
        {"test -n 1 --scale 1x x", "option '--scale' takes a number, not '1x'"},
        {"test -n 1 --part 0/2 x", "option '--part' takes I/N with I from 1 to N"},
        {"test -n 1 --part 3/2 x", "not '3/2'"},
        {"test -n 1 --part 1 x", "not '1'"},
        {"test -n 1 --part automatic x", "or auto, not 'automatic'"},
        {"test -n 1 --memory 4X x",
         "option '--memory' takes a size in bytes, or like 512M, 4G, not '4X'"},
        {"test -n 1 --memory 4MiBs x", "not '4MiBs'"},
        {"test -n 1 --memory 4B x", "not '4B'"},
        {"test -n 1 --memory M x", "not 'M'"},
        {"test -n 1 --memory 0 x", "not '0'"},
        {"test -n 1 --memory -1 x", "not '-1'"},
        {"test -n 1 --memory 1e9 x", "not '1e9'"},
        {"test -n 1 --memory 9999999999T x", "not '9999999999T'"},
        {"test -n 1 --memory ~ x", "not ''"},
        {"test -n 1 --part 1/2/3 x", "not '1/2/3'"},
        {"test -n 1 --merge-dtype bf16 x",
         "option '--merge-dtype' takes one of base|f32, not 'bf16'"},
        {"test -n 1 --merge-dtype ~ x", "not ''"},
        {"test -n 1 --model ~ x", "option '--model' was given an empty text"},
        {"test -n 1 -n 2 x", "option '--number' was given twice"},
        {"test -n 1 x --model", "option '--model' needs a value: --model M"},
        {"test -n 1 x -m", "option '--model' needs a value: --model M"},
        {"test -n 1 x --force=1", "option '--force' takes no value"},
        {"test -n 1 x --modle m", "unknown option '--modle'; did you mean '--model'?"},
        {"test -n 1 x --sede=3", "unknown option '--sede'; did you mean '--seed'?"},
        {"test -n 1 x --qwertz", "unknown option '--qwertz'"},
        {"test -n 1 x -z", "unknown option '-z'"},
    };

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(bad); i++) {
        char line[128];
        struct args args;
        pf_error err;

        memcpy(line, bad[i].line, strlen(bad[i].line) + 1);
        if (parse(line, &args, &err) != PF_E_INVALID)
            fail_msg("'%s' was taken", bad[i].line);
        if (!strstr(err.msg, bad[i].msg))
            fail_msg("'%s': %s", bad[i].line, err.msg);
        args_release(&cmd, &args);
    }
}

static void knows_sizes_and_automatic_parts(void **state)
{
    static const struct {
        const char *line;
        uint64_t v;
    } good[] = {
        {"test -n 1 --memory 4096 x", 4096},
        {"test -n 1 --memory 512M x", (uint64_t)512 << 20},
        {"test -n 1 --memory 4GiB x", (uint64_t)4 << 30},
        {"test -n 1 --memory 4GB x", 4000000000u},
        {"test -n 1 --memory 1.5k x", 1536},
        {"test -n 1 --memory 2T x", (uint64_t)2 << 40},
    };
    struct args args;
    pf_error err;
    char line[64];

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(good); i++) {
        memcpy(line, good[i].line, strlen(good[i].line) + 1);
        assert_int_equal(parse(line, &args, &err), PF_OK);
        assert_true(args.memory.is_set && args.memory.v == good[i].v);
    }
    memcpy(line, "test -n 1 --part auto x", sizeof("test -n 1 --part auto x"));
    assert_int_equal(parse(line, &args, &err), PF_OK);
    assert_true(args.part.is_auto && args.part.n == 0);
}

static void suggests_nothing_far_off(void **state)
{
    char line[] = "test -n 1 x --qwertz";
    struct args args;
    pf_error err;

    (void)state;
    assert_int_equal(parse(line, &args, &err), PF_E_INVALID);
    assert_null(strstr(err.msg, "did you mean"));
    args_release(&cmd, &args);
}

static void help_needs_nothing_else(void **state)
{
    char line[] = "test --help";
    struct args args;
    pf_error err;

    (void)state;
    assert_int_equal(parse(line, &args, &err), PF_OK);
    assert_true(args.common.help);
    args_release(&cmd, &args);
}

static void finds_near_names(void **state)
{
    static const char *const names[] = {"inspect", "plan", "merge", "completion"};

    (void)state;
    assert_string_equal(near_name("inspekt", names, 4), "inspect");
    assert_string_equal(near_name("plna", names, 4), "plan");
    assert_string_equal(near_name("comp", names, 4), "completion");
    assert_null(near_name("x", names, 4));
    assert_null(near_name("generate", names, 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fills_every_type),
        cmocka_unit_test(names_every_mistake),
        cmocka_unit_test(knows_sizes_and_automatic_parts),
        cmocka_unit_test(suggests_nothing_far_off),
        cmocka_unit_test(help_needs_nothing_else),
        cmocka_unit_test(finds_near_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
