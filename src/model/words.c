/*
 * See words.h. Words are runs of ASCII letters, digits and bytes of other scripts; case does not count in ASCII. Everything is on
 * the stack and bounded: a prompt counts with its first 64 words.
 */
#include "model/words.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#define WORDS_MAX     64
#define NEAR_MAX      8
#define LIST_MAX      64
#define LABEL_LEN_MAX 1024

static bool is_word_byte(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (unsigned char)c >= 0x80;
}

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* The next word at or after *i; false at the end. */
static bool next_word(struct str text, size_t *i, struct str *out)
{
    while (*i < text.n && !is_word_byte(text.p[*i]))
        (*i)++;
    size_t start = *i;
    while (*i < text.n && is_word_byte(text.p[*i]))
        (*i)++;
    *out = (struct str){text.p + start, *i - start};
    return out->n > 0;
}

static size_t split_words(struct str text, struct str *words)
{
    size_t n = 0, i = 0;
    while (n < WORDS_MAX && next_word(text, &i, &words[n]))
        n++;
    return n;
}

static bool same_start(struct str a, struct str b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (lower(a.p[i]) != lower(b.p[i]))
            return false;
    return true;
}

static bool is_plural_of(struct str many, struct str one)
{
    if (many.n == one.n + 1)
        return one.n >= 2 && same_start(many, one, one.n) && lower(many.p[one.n]) == 's';
    return many.n == one.n + 2 && one.n >= 2 && same_start(many, one, one.n) &&
           lower(many.p[one.n]) == 'e' && lower(many.p[one.n + 1]) == 's';
}

static bool same_word(struct str a, struct str b, bool is_exact)
{
    if (a.n == b.n && same_start(a, b, a.n))
        return true;
    return !is_exact && (is_plural_of(a, b) || is_plural_of(b, a));
}

/* The next synonym of a name: what stands between commas. */
static bool next_synonym(struct str name, size_t *i, struct str *out)
{
    if (*i > name.n)
        return false;
    size_t start = *i;
    while (*i < name.n && name.p[*i] != ',')
        (*i)++;
    *out = (struct str){name.p + start, *i - start};
    (*i)++;
    return true;
}

struct match {
    size_t n_words, i_first;
    uint32_t i_class;
};

/* Looks for a phrase among the prompt's words; a longer or earlier one than *best replaces it. */
static void match_phrase(const struct str *words, size_t n_words, struct str phrase, bool is_exact,
                         uint32_t i_class, struct match *best)
{
    struct str part[WORDS_MAX];
    size_t n = split_words(phrase, part);
    for (size_t at = 0; n > 0 && at + n <= n_words; at++) {
        size_t same = 0;
        while (same < n && same_word(words[at + same], part[same], is_exact))
            same++;
        if (same < n)
            continue;
        if (n > best->n_words || (n == best->n_words && at < best->i_first))
            *best = (struct match){n, at, i_class};
        return;
    }
}

static bool find_phrase(const struct labels *l, const struct str *words, size_t n_words,
                        bool is_exact, uint32_t *out_class)
{
    struct match best = {0};
    for (uint32_t i = 0; i < l->n_classes; i++) {
        struct str phrase;
        size_t at = 0;
        if (l->names[i] == NULL)
            continue;
        while (next_synonym(str_of(l->names[i]), &at, &phrase))
            match_phrase(words, n_words, phrase, is_exact, i, &best);
    }
    if (best.n_words > 0)
        *out_class = best.i_class;
    return best.n_words > 0;
}

static bool has_word(struct str name, struct str word)
{
    struct str part;
    for (size_t i = 0; next_word(name, &i, &part);)
        if (same_word(part, word, false))
            return true;
    return false;
}

static bool is_article(struct str word)
{
    static const char *const articles[] = {"a", "an", "the", "one", "some", "of", "please"};
    for (size_t i = 0; i < PF_COUNTOF(articles); i++)
        if (same_word(word, str_of(articles[i]), true))
            return true;
    return false;
}

/* "the moon": the one name that has every word of the prompt. */
static bool find_only(const struct labels *l, const struct str *words, size_t n_words,
                      uint32_t *out_class)
{
    uint32_t n_found = 0, i_found = 0;
    size_t n_asked = 0;
    for (size_t w = 0; w < n_words; w++)
        n_asked += is_article(words[w]) ? 0 : 1;
    for (uint32_t i = 0; n_asked > 0 && i < l->n_classes; i++) {
        size_t n_has = 0;
        for (size_t w = 0; l->names[i] != NULL && w < n_words; w++)
            n_has += !is_article(words[w]) && has_word(str_of(l->names[i]), words[w]) ? 1 : 0;
        if (n_has == n_asked) {
            i_found = i;
            n_found++;
        }
    }
    if (n_found == 1)
        *out_class = i_found;
    return n_found == 1;
}

static bool is_near(struct str name, const struct str *words, size_t n_words)
{
    struct str part;
    for (size_t i = 0; next_word(name, &i, &part);)
        for (size_t w = 0; w < n_words; w++) {
            size_t shorter = part.n < words[w].n ? part.n : words[w].n;
            size_t cap = shorter >= 6 ? 2 : shorter >= 4 ? 1 : 0;
            if (same_word(part, words[w], false) ||
                (part.n <= LABEL_LEN_MAX && words[w].n <= LABEL_LEN_MAX &&
                 str_distance(part, words[w], cap) <= cap))
                return true;
        }
    return false;
}

static int report_missing(const struct labels *l, const char *prompt, const struct str *words,
                          size_t n_words, pf_error *err)
{
    unsigned n = 0;
    int rc = err_set(err, PF_E_NOTFOUND, "prompt '%.256s' names none of the %u classes", prompt,
                     l->n_classes);
    for (uint32_t i = 0; i < l->n_classes && n < NEAR_MAX; i++)
        if (l->names[i] != NULL && is_near(str_of(l->names[i]), words, n_words))
            err_append(err, "%s'%.64s'", n++ == 0 ? "; near it are " : ", ", l->names[i]);
    n = 0;
    for (uint32_t i = 0; i < l->n_classes && n < LIST_MAX; i++)
        if (l->names[i] != NULL)
            err_append(err, "%s%.64s", n++ == 0 ? "; they are " : ", ", l->names[i]);
    if (n == LIST_MAX && l->n_classes > LIST_MAX)
        err_append(err, ", and %u more", l->n_classes - LIST_MAX);
    return rc;
}

int labels_find(const struct labels *l, const char *prompt, uint32_t *out_class, pf_error *err)
{
    struct str words[WORDS_MAX];
    size_t n_words = split_words(str_of(prompt), words);
    if (l->n_names == 0)
        return err_set(err, PF_E_NOTFOUND,
                       "the model names no classes (no 'id2label' in model_index.json or "
                       "config.json): give a class number instead of prompt '%.256s'",
                       prompt);
    if (find_phrase(l, words, n_words, true, out_class) ||
        find_phrase(l, words, n_words, false, out_class) || find_only(l, words, n_words, out_class))
        return PF_OK;
    return report_missing(l, prompt, words, n_words, err);
}

static int read_names(struct labels *l, const struct json *id2label, pf_error *err)
{
    const char *key = NULL;
    const struct json *value = NULL;
    for (void *it = json_iter_next(id2label, NULL, &key, &value); it != NULL;
         it = json_iter_next(id2label, it, &key, &value)) {
        uint64_t id = 0;
        const char *name = json_z(value);
        if (!str_to_u64(str_of(key), &id) || name == NULL)
            return err_set(err, PF_E_FORMAT, "'id2label': '%.64s' does not map a number to a name",
                           key);
        if (id >= l->n_classes) {
            log_at(PF_LOG_WARN, "id2label names class %llu, but the model has %u classes",
                   (unsigned long long)id, l->n_classes);
            continue;
        }
        l->names[id] = arena_strndup(&l->arena, name, str_of(name).n);
        if (l->names[id] == NULL)
            return err_nomem(err, str_of(name).n, "class names");
        l->n_names++;
    }
    return PF_OK;
}

int labels_read(struct labels *l, uint32_t n_classes, const struct json *model_index,
                const struct json *config, pf_error *err)
{
    const struct json *names = json_get(model_index, "id2label");
    if (json_typeof(names) != JSON_T_OBJECT)
        names = json_get(config, "id2label");
    *l = (struct labels){.n_classes = n_classes};
    arena_init(&l->arena);
    l->names = mem_calloc(n_classes, sizeof *l->names);
    if (l->names == NULL)
        return err_nomem(err, n_classes * sizeof *l->names, "class names");
    int rc = json_typeof(names) == JSON_T_OBJECT ? read_names(l, names, err) : PF_OK;
    if (rc != PF_OK)
        labels_release(l);
    return rc;
}

void labels_release(struct labels *l)
{
    mem_free(l->names);
    arena_release(&l->arena);
    *l = (struct labels){0};
}
