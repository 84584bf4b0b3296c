/*
 * JSON documents over jansson; the only file that includes its header. Parsing adds what jansson does not offer: a depth limit
 * of ours, errors that name the document, UTF-8 repair on the way in. Writing is our own: shortest decimals that read back as
 * the same double, the C locale's decimal point, and out of memory while building noticed at the end.
 *
 * How a failed setter is remembered: the container's jansson type becomes POISON_*, so jansson refuses to touch it further and
 * json_write sees it. json_free turns it back first, for jansson frees by type.
 */
#include "base/json.h"

#include "base/file.h"
#include "base/mem.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Macros of jansson that have our names. */
#undef json_typeof
#undef json_is_number

#define DEPTH_MAX 64

enum { POISON_OBJECT = 1000, POISON_ARRAY = 1001 };

/* struct json is never defined: a pointer to it is jansson's, under our name. */
static struct json *ours(json_t *v)
{
    return (struct json *)v;
}

/* jansson asks for a non-const pointer even where it only reads. */
static json_t *theirs(const struct json *v)
{
    return (json_t *)(uintptr_t)v;
}

static int type_of(const struct json *v)
{
    if (v == NULL)
        return JSON_NULL;
    int type = (int)theirs(v)->type;
    if (type == POISON_OBJECT)
        return JSON_OBJECT;
    return type == POISON_ARRAY ? JSON_ARRAY : type;
}

static bool is_poisoned(const struct json *v)
{
    return (int)theirs(v)->type >= POISON_OBJECT;
}

static void poison(json_t *container)
{
    if (container->type == JSON_OBJECT)
        container->type = (json_type)POISON_OBJECT;
    else if (container->type == JSON_ARRAY)
        container->type = (json_type)POISON_ARRAY;
}

/* ----------------------------------------------------------------------------------------------- parsing */

/* The first place where brackets nest deeper than DEPTH_MAX. jansson's own limit, 2048, is fixed in its build. */
static bool is_too_deep(const char *p, size_t n, size_t *out_off)
{
    size_t depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        char c = p[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > DEPTH_MAX) {
                *out_off = i;
                return true;
            }
        } else if ((c == ']' || c == '}') && depth > 0) {
            depth--;
        }
    }
    return false;
}

int json_parse(const char *p, size_t n, const char *what, struct json **out, pf_error *err)
{
    size_t off;
    if (is_too_deep(p, n, &off))
        return err_at(err, PF_E_FORMAT, off,
                      "'%s' is not acceptable JSON: nested deeper than %d at byte %zu", what,
                      DEPTH_MAX, off);
    json_error_t e;
    json_t *root = json_loadb(n > 0 ? p : "", n,
                              JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
    if (root == NULL) {
        /* Where memory is too short to begin with, jansson leaves the text empty. */
        if (json_error_code(&e) == json_error_out_of_memory || e.text[0] == '\0')
            return err_nomem(err, n, what);
        uint64_t at = e.position > 0 ? (uint64_t)e.position : 0;
        return err_at(err, PF_E_FORMAT, at, "'%s' is not valid JSON: line %d, byte %llu: %s", what,
                      e.line, (unsigned long long)at, e.text);
    }
    *out = ours(root);
    return PF_OK;
}

int json_parse_file(const char *path, size_t n_bytes_max, struct json **out, pf_error *err)
{
    char *text = NULL;
    size_t n = 0;
    int rc = file_read_all(path, n_bytes_max, &text, &n, err);
    if (rc != PF_OK)
        return rc;
    rc = json_parse(text, n, path, out, err);
    mem_free(text);
    return rc;
}

/* Gives poisoned containers their types back. Depth: parsed documents are bounded, built ones are ours. */
static void heal(json_t *v)
{
    if (v == NULL)
        return;
    if (is_poisoned(ours(v))) /* never otherwise: true, false and null are shared by all threads */
        v->type = (json_type)type_of(ours(v));
    if (v->type == JSON_OBJECT) {
        for (void *it = json_object_iter(v); it != NULL; it = json_object_iter_next(v, it))
            heal(json_object_iter_value(it));
    } else if (v->type == JSON_ARRAY) {
        for (size_t i = 0; i < json_array_size(v); i++)
            heal(json_array_get(v, i));
    }
}

void json_free(struct json *root)
{
    heal(theirs(root));
    json_decref(theirs(root));
}

/* ----------------------------------------------------------------------------------------------- reading */

enum json_type json_typeof(const struct json *v)
{
    switch (type_of(v)) {
    case JSON_TRUE:
    case JSON_FALSE:
        return JSON_T_BOOL;
    case JSON_INTEGER:
        return JSON_T_INT;
    case JSON_REAL:
        return JSON_T_REAL;
    case JSON_STRING:
        return JSON_T_STRING;
    case JSON_ARRAY:
        return JSON_T_ARRAY;
    case JSON_OBJECT:
        return JSON_T_OBJECT;
    default:
        return JSON_T_NULL;
    }
}

bool json_is_number(const struct json *v)
{
    return type_of(v) == JSON_INTEGER || type_of(v) == JSON_REAL;
}

double json_number(const struct json *v)
{
    if (v == NULL)
        return 0;
    return type_of(v) == JSON_INTEGER ? (double)json_integer_value(theirs(v))
                                      : json_real_value(theirs(v));
}

bool json_is_whole(const struct json *v)
{
    double x;

    if (type_of(v) != JSON_REAL)
        return type_of(v) == JSON_INTEGER;
    x = json_real_value(theirs(v));
    return x == floor(x) && fabs(x) <= 9007199254740992; /* 2^53: beyond, a double skips numbers */
}

int64_t json_int(const struct json *v)
{
    if (type_of(v) == JSON_REAL)
        return json_is_whole(v) ? (int64_t)json_real_value(theirs(v)) : 0;
    return json_integer_value(theirs(v));
}

bool json_bool(const struct json *v)
{
    return type_of(v) == JSON_TRUE;
}

struct str json_str(const struct json *v)
{
    if (type_of(v) != JSON_STRING)
        return (struct str){"", 0};
    return (struct str){json_string_value(theirs(v)), json_string_length(theirs(v))};
}

const char *json_z(const struct json *v)
{
    struct str s = json_str(v);
    if (type_of(v) != JSON_STRING || memchr(s.p, '\0', s.n) != NULL)
        return NULL;
    return s.p;
}

const struct json *json_get(const struct json *object, const char *key)
{
    return ours(json_object_get(theirs(object), key));
}

size_t json_len(const struct json *v)
{
    return type_of(v) == JSON_OBJECT ? json_object_size(theirs(v)) : json_array_size(theirs(v));
}

const struct json *json_at(const struct json *array, size_t i)
{
    return ours(json_array_get(theirs(array), i));
}

void *json_iter_next(const struct json *object, void *iter, const char **out_key,
                     const struct json **out_value)
{
    json_t *o = theirs(object);
    iter = iter == NULL ? json_object_iter(o) : json_object_iter_next(o, iter);
    if (iter != NULL) {
        *out_key = json_object_iter_key(iter);
        *out_value = ours(json_object_iter_value(iter));
    }
    return iter;
}

/* ---------------------------------------------------------------------------------------------- building */

struct json *json_new_object(void)
{
    return ours(json_object());
}

struct json *json_new_array(void)
{
    return ours(json_array());
}

/* Appends s with U+FFFD in the place of each byte that is no UTF-8. */
static void add_repaired(struct strbuf *b, struct str s)
{
    size_t off;
    while (!str_is_utf8(s, &off)) {
        strbuf_add(b, s.p, off);
        strbuf_adds(b, "\xef\xbf\xbd");
        s = str_cut_front(s, off + 1);
    }
    strbuf_add(b, s.p, s.n);
}

struct json *json_new_string(struct str s)
{
    if (str_is_utf8(s, NULL))
        return ours(json_stringn_nocheck(s.n > 0 ? s.p : "", s.n));
    struct strbuf b;
    strbuf_init(&b);
    add_repaired(&b, s);
    json_t *v = strbuf_ok(&b) ? json_stringn_nocheck(b.p, b.n) : NULL;
    strbuf_release(&b);
    return ours(v);
}

struct json *json_new_int(int64_t v)
{
    return ours(json_integer(v));
}

struct json *json_new_real(double v)
{
    return ours(isfinite(v) ? json_real(v) : json_null());
}

struct json *json_new_bool(bool v)
{
    return ours(v ? json_true() : json_false());
}

struct json *json_new_null(void)
{
    return ours(json_null());
}

void json_set(struct json *object, const char *key, struct json *v)
{
    if (object == NULL || v == NULL || type_of(object) != JSON_OBJECT || is_poisoned(object))
        goto fail;
    if (str_is_utf8(str_of(key), NULL)) {
        /* Jansson drops its reference when it fails; ours is dropped by json_free */
        json_incref(theirs(v));
        if (json_object_set_new_nocheck(theirs(object), key, theirs(v)) != 0)
            goto fail;
        json_decref(theirs(v));
        return;
    }
    struct strbuf b;
    strbuf_init(&b);
    add_repaired(&b, str_of(key));
    if (strbuf_ok(&b)) {
        json_set(object, b.p, v);
        strbuf_release(&b);
        return;
    }
    strbuf_release(&b);
fail:
    if (object != NULL)
        poison(theirs(object));
    json_free(v);
}

void json_add(struct json *array, struct json *v)
{
    if (array != NULL && v != NULL && type_of(array) == JSON_ARRAY && !is_poisoned(array)) {
        json_incref(theirs(v));
        if (json_array_append_new(theirs(array), theirs(v)) == 0) {
            json_decref(theirs(v));
            return;
        }
    }
    if (array != NULL)
        poison(theirs(array));
    json_free(v);
}

void json_set_z(struct json *object, const char *key, const char *z)
{
    json_set(object, key, z != NULL ? json_new_string(str_of(z)) : json_new_null());
}

void json_set_int(struct json *object, const char *key, int64_t v)
{
    json_set(object, key, json_new_int(v));
}

void json_set_real(struct json *object, const char *key, double v)
{
    json_set(object, key, json_new_real(v));
}

void json_set_bool(struct json *object, const char *key, bool v)
{
    json_set(object, key, json_new_bool(v));
}

/* ----------------------------------------------------------------------------------------------- writing */

static void write_string(struct strbuf *b, struct str s)
{
    strbuf_adds(b, "\"");
    for (size_t i = 0; i < s.n; i++) {
        unsigned char c = (unsigned char)s.p[i];
        if (c == '"' || c == '\\')
            strbuf_add(b, (char[]){'\\', (char)c}, 2);
        else if (c == '\n')
            strbuf_adds(b, "\\n");
        else if (c == '\t')
            strbuf_adds(b, "\\t");
        else if (c == '\r')
            strbuf_adds(b, "\\r");
        else if (c < 0x20 || c == 0x7f) /* DEL needs no escape, but terminals like it no better */
            strbuf_addf(b, "\\u%04x", c);
        else
            strbuf_add(b, s.p + i, 1);
    }
    strbuf_adds(b, "\"");
}

/* The shortest decimal that reads back as v. printf and strtod follow the locale, so compare first, then fix the point. */
static void write_real(struct strbuf *b, double v)
{
    char z[64];
    for (int precision = 15; precision <= 17; precision++) {
        /* 24 bytes at most, and a multi-byte point */
        (void)snprintf(z, sizeof(z), "%.*g", precision, v);
        if (strtod(z, NULL) == v)
            break;
    }
    bool is_real = false;
    for (const char *c = z; *c != '\0'; c++) {
        if (strchr("+-0123456789e", *c) != NULL) {
            strbuf_add(b, c, 1);
            is_real = is_real || *c == 'e';
        } else if (!is_real) {
            strbuf_adds(b, ".");
            is_real = true;
        }
    }
    if (!is_real)
        strbuf_adds(b, ".0"); /* stays a real when it is read again */
}

static void new_line(struct strbuf *b, unsigned indent, unsigned depth, bool is_first)
{
    if (!is_first)
        strbuf_adds(b, indent > 0 ? "," : ", ");
    if (indent > 0)
        strbuf_addf(b, "\n%*s", (int)(indent * depth), "");
}

static bool write_value(struct strbuf *b, const struct json *v, unsigned indent, unsigned depth);

static bool write_container(struct strbuf *b, const struct json *v, unsigned indent, unsigned depth)
{
    bool is_object = type_of(v) == JSON_OBJECT;
    size_t n = json_len(v);
    void *iter = NULL;
    strbuf_adds(b, is_object ? "{" : "[");
    for (size_t i = 0; i < n; i++) {
        const struct json *item = NULL;
        new_line(b, indent, depth + 1, i == 0);
        if (is_object) {
            const char *key = "";
            iter = json_iter_next(v, iter, &key, &item);
            write_string(b, str_of(key));
            strbuf_adds(b, ": ");
        } else {
            item = json_at(v, i);
        }
        if (!write_value(b, item, indent, depth + 1))
            return false;
    }
    if (indent > 0 && n > 0)
        new_line(b, indent, depth, true);
    strbuf_adds(b, is_object ? "}" : "]");
    return true;
}

/* false: a setter failed somewhere below */
static bool write_value(struct strbuf *b, const struct json *v, unsigned indent, unsigned depth)
{
    if (v == NULL || is_poisoned(v))
        return false;
    switch (json_typeof(v)) {
    case JSON_T_NULL:
        strbuf_adds(b, "null");
        return true;
    case JSON_T_BOOL:
        strbuf_adds(b, json_bool(v) ? "true" : "false");
        return true;
    case JSON_T_INT:
        strbuf_addf(b, "%lld", (long long)json_int(v));
        return true;
    case JSON_T_REAL:
        write_real(b, json_number(v));
        return true;
    case JSON_T_STRING:
        write_string(b, json_str(v));
        return true;
    default:
        return write_container(b, v, indent, depth);
    }
}

int json_write(const struct json *v, unsigned indent, struct strbuf *out, pf_error *err)
{
    if (!write_value(out, v, indent, 0) || !strbuf_ok(out))
        return err_set(err, PF_E_NOMEM, "out of memory for a JSON document");
    return PF_OK;
}
