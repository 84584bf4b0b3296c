/*
 * Nicknames and where adapters may come from: files inside the adapter directories (links that lead inside are followed, links that
 * lead out are refused), the bundled ones by name, and what the command line named. Loads into the engine and can take that back
 * when the change that wanted it failed.
 */
#ifndef PF_SERVER_LORA_BOOK_H
#define PF_SERVER_LORA_BOOK_H

#include "base/json.h"
#include "server/server.h"

#define BOOK_NICKNAMES_MAX 256

struct lora_book;

struct book_opts {
    struct pf_engine *engine;
    const char *const *dirs; /* --adapter-dir */
    size_t n_dirs;
    const struct server_bundled *bundled;
    size_t n_bundled;
};

int book_new(const struct book_opts *opts, struct lora_book **out_book, pf_error *err);
void book_free(struct lora_book *b);

/* A path that a client sent -> a path that may be opened (owned by caller). *out_status on failure: 403, 404 or 422. */
int book_resolve(struct lora_book *b, const char *text, char **out_path, int *out_status,
                 pf_error *err);
/* From the command line: any path. */
int book_load_trusted(struct lora_book *b, const char *nickname, const char *path, pf_error *err);

/* What one request loaded, so that it can be undone. Zero it first; release always. */
struct book_undo {
    struct undo_item *items;
    size_t n, cap;
};

/* Loads text under the nickname; text NULL: must be known, and is loaded anew when its file changed. PF_OK, or *out_status. */
int book_load(struct lora_book *b, const char *nickname, const char *text, struct book_undo *undo,
              int *out_status, pf_error *err);
/*
 * For one request alone; text NULL as above. Under `wanted` when no other file has that nickname, else under another one, so that
 * nobody's nickname comes to mean another file. It makes room when BOOK_NICKNAMES_MAX are loaded, unless book_load named it since.
 * *out_nickname is owned by caller.
 */
int book_load_passing(struct lora_book *b, const char *wanted, const char *text,
                      struct book_undo *undo, char **out_nickname, int *out_status, pf_error *err);
/* Drops it. PF_E_NOTFOUND, PF_E_BUSY. */
int book_unload(struct lora_book *b, const char *nickname, pf_error *err);
void book_undo(struct lora_book *b, struct book_undo *undo);
void book_undo_release(struct book_undo *undo);

/* Requests that name paths are done one at a time, so that the file under a nickname is the one that they loaded. */
void book_lock_paths(struct lora_book *b);
void book_unlock_paths(struct lora_book *b);

/* The path that may be opened for a nickname, or NULL. Owned by caller. */
char *book_path(struct lora_book *b, const char *nickname);
/* The path that acts under a nickname as it was given, for lists; `path` when nobody gave it. */
struct json *book_given_path_json(struct lora_book *b, const char *nickname, const char *path);
/* [{"nickname", "path"}] */
struct json *book_json(struct lora_book *b);

#endif
