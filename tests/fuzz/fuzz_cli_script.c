/*
 * Fuzz target: one line of a script. What is accepted says the same when its words are written down again, each character of them
 * made plain; what is refused leaves nothing behind. Touches no file.
 */
#include "cli/script.h"

#include <stdlib.h>
#include <string.h>

#include "base/str.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

static void write_down(const struct script_line *line, struct strbuf *b)
{
    for (size_t i = 0; i < line->n_words; i++) {
        strbuf_adds(b, *line->words[i] ? " " : " ''"); /* an empty word needs its quotes */
        for (const char *c = line->words[i]; *c; c++)
            strbuf_addf(b, "\\%c", *c);
    }
    if (line->is_background)
        strbuf_adds(b, " &");
}

static void same_again(const struct script_line *line)
{
    struct script_line again = {0};
    struct strbuf b;
    pf_error err = {0};

    strbuf_init(&b);
    write_down(line, &b);
    if (strbuf_ok(&b) && b.n <= SCRIPT_LINE_MAX) {
        require(!script_parse((struct str){b.p, b.n}, &again, &err));
        require(again.op == line->op && again.n_words == line->n_words &&
                again.is_background == line->is_background && again.n_specs == line->n_specs);
        for (size_t i = 0; i < line->n_words; i++)
            require(!strcmp(again.words[i], line->words[i]));
        script_line_release(&again);
    }
    strbuf_release(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct script_line line = {0};
    pf_error err = {0};
    int rc = script_parse((struct str){(const char *)p, n}, &line, &err);

    if (rc) {
        require(err.code == rc && err.msg[0] && !line.text && !line.words && !line.specs);
        return 0;
    }
    require((line.op == SCRIPT_NOTHING) == (line.n_words == 0) && !line.words[line.n_words]);
    require(!line.is_background || line.op == SCRIPT_GENERATE);
    require((line.n_specs > 0) == (line.op == SCRIPT_SET));
    require((line.op == SCRIPT_LOAD) == (line.path != NULL));
    if (line.op != SCRIPT_NOTHING && line.op != SCRIPT_LOAD) /* load cuts its word in two */
        same_again(&line);
    script_line_release(&line);
    return 0;
}
