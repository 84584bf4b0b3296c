/*
 * pageflip: serve weights that are bigger than memory, and change LoRA adapters on them meanwhile.
 *
 * Read this header from top to bottom: it is the tutorial. A program
 *
 *     1. opens a checkpoint            pf_checkpoint_open   (mapped, read-only, never written)
 *     2. opens adapters                pf_adapter_open      (mapped, validated, digested)
 *     3. composes them                 pf_composition_new   (resolved against the base; nothing is merged yet)
 *     4. takes a view                  pf_view_open         (what a reader holds: one composition, fixed)
 *     5. reads panels through readers  pf_reader_read       (base bytes plus deltas, computed on the way)
 *
 * or writes the merged checkpoint (pf_merge), or draws with it (pf_generate).
 *
 * Rules that hold everywhere
 *   ownership   `struct x **out_x` is owned by the caller and freed by the matching _close/_free/_release, all
 *               of which take NULL. A returned `const char *` or `const void *` is borrowed from the first argument.
 *   errors      functions return PF_OK (0) or a negative PF_E_* and fill `err` when it is not NULL. Outputs are
 *               written only on success. There is no global error state and errno is not part of any contract.
 *   options     `struct pf_*_opts` starts with `size = sizeof(struct)`; zero means default; NULL means all defaults. What the
 *               shorter struct of an older header has not is default too.
 *   indices     count from 0. Past the end a getter says so by its answer: NULL, false, -1, or a struct of zeros.
 *   threads     objects are immutable after they are opened and may be shared by threads, except where the
 *               comment says "one thread": pf_reader is the one that matters.
 */
#ifndef PAGEFLIP_H
#define PAGEFLIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header; pf_version() is the library's. Within a major version the header only grows. */
#define PF_VERSION_MAJOR  0
#define PF_VERSION_MINOR  1
#define PF_VERSION_PATCH  0
#define PF_VERSION_STRING "0.1.0"

#if defined(__GNUC__)
#define PF_API __attribute__((visibility("default")))
#else
#define PF_API
#endif

/* ---------------------------------------------------------------------------------------------- errors */

enum {
    PF_OK = 0,
    PF_E_INVALID = -1,  /* an argument is wrong: a strength that is NaN, an index out of range */
    PF_E_NOMEM = -2,    /* memory could not be allocated */
    PF_E_IO = -3,       /* the system refused: see sys_errno */
    PF_E_NOTFOUND = -4, /* a file, tensor, component or class does not exist */
    PF_E_FORMAT = -5,   /* a file breaks the rules of its format; `off` is the byte offset */
    PF_E_RANGE = -6,    /* a size overflows or lies beyond a bound */
    /* Understood, and refused by name: a family, dtype, class or file type */
    PF_E_UNSUPPORTED = -7,
    PF_E_MISMATCH = -8,   /* adapter and base, or two factors, disagree about a shape or rank */
    PF_E_UNMATCHED = -9,  /* adapter keys that name no tensor of the base */
    PF_E_AMBIGUOUS = -10, /* one name, two possible tensors */
    /* Two sources (config, metadata, alpha tensors, spellings) contradict each other */
    PF_E_CONFLICT = -11,
    PF_E_NONFINITE = -12, /* NaN or infinity in factors */
    PF_E_OVERFLOW = -13,  /* the merged weights would not be finite in their dtype */
    PF_E_TRUNCATED = -14, /* a mapped file shrank under us */
    PF_E_CHANGED = -15,   /* a mapped file changed under us */
    PF_E_EXISTS = -16,    /* the output exists */
    PF_E_NOSPACE = -17,   /* the disk is full, or would be */
    PF_E_BUSY = -18,      /* in use by another process, or by a view */
    PF_E_CANCELLED = -19, /* cancelled by the caller */
    PF_E_STATE = -20,     /* not possible in the present state */
};

/* Caller's storage. `msg` is one sentence: lower case, no full stop, what failed first, subject quoted. */
typedef struct pf_error {
    int32_t code;
    int32_t sys_errno; /* errno of the failed call, or 0 */
    uint64_t off;      /* byte offset in the file named by msg, when code is PF_E_FORMAT */
    char msg[4080];
} pf_error;

/* PF_E_FORMAT is "format"; "unknown" for what is no code. Never NULL. */
PF_API const char *pf_error_name(int code);
/* "0.1.0", of the library that runs. */
PF_API const char *pf_version(void);

/* ----------------------------------------------------------------------------------------------- dtypes */

/* Every dtype that safetensors names. Sub-byte dtypes are known by name and size only. */
enum {
    PF_BOOL,
    PF_F4,
    PF_F6_E2M3,
    PF_F6_E3M2,
    PF_U8,
    PF_I8,
    PF_F8_E5M2,
    PF_F8_E4M3,
    PF_F8_E8M0,
    PF_F8_E4M3FNUZ,
    PF_F8_E5M2FNUZ,
    PF_I16,
    PF_U16,
    PF_F16,
    PF_BF16,
    PF_I32,
    PF_U32,
    PF_F32,
    PF_C64,
    PF_F64,
    PF_I64,
    PF_U64,
    PF_N_DTYPES
};

PF_API const char *pf_dtype_name(int32_t dtype); /* "BF16"; "?" when unknown */
PF_API uint32_t pf_dtype_bits(int32_t dtype);    /* 16 for BF16; 0 when unknown */

/* ------------------------------------------------------------------------------------------ checkpoints */

/*
 * The base weights: one `.safetensors`, a sharded set (the index file, or the directory that holds it), a
 * diffusers model directory with components, or `org/name`, looked up offline in the local Hugging Face hub cache.
 * Mapped read-only; never written.
 */
struct pf_checkpoint;

struct pf_checkpoint_opts {
    uint32_t size;
    uint32_t flags; /* none yet */
};

/* The most dimensions that a tensor may have. */
#define PF_MAX_RANK 8

struct pf_tensor_info {
    const char *name; /* as an adapter would address it: "transformer_blocks.0.attn1.to_q.weight" */
    const char *component; /* "transformer" */
    const char *file;      /* path of the file it lives in */
    int32_t dtype;
    int32_t rank;
    int64_t shape[PF_MAX_RANK];
    uint64_t off_bytes; /* in the file */
    uint64_t n_bytes;
    uint32_t i_component;
    uint32_t i_layer; /* into the layers of the whole checkpoint */
};

/* A layer is the unit of streaming: one repeated block, or a component's stem (what belongs to no block). */
struct pf_layer_info {
    const char *name; /* "transformer_blocks.7", or "stem" */
    uint32_t i_component;
    bool is_stem;
    uint32_t n_tensors;
    uint64_t n_bytes;
};

struct pf_component_info {
    const char *name;        /* "transformer"; the only one of a checkpoint without components */
    const char *path;        /* directory or file */
    const char *config_path; /* its config.json, or NULL */
    const char *class_name;  /* "_class_name" or architectures[0] of the config, or NULL */
    uint32_t n_tensors, n_layers, n_files;
    uint64_t n_bytes;
};

struct pf_checkpoint_info {
    const char *path;   /* as resolved */
    const char *layout; /* "file", "sharded", "directory" */
    uint32_t n_components, n_layers, n_tensors, n_files;
    uint64_t n_bytes; /* of tensor data */
};

/* PF_E_NOTFOUND, PF_E_FORMAT, PF_E_UNSUPPORTED (.bin, .ckpt, .pt, .gguf: refused by name, with a hint). */
PF_API int pf_checkpoint_open(const char *path, const struct pf_checkpoint_opts *opts,
                              struct pf_checkpoint **out_ckpt, pf_error *err);
/* Drops one reference; views, compositions, models and engines hold their own. */
PF_API void pf_checkpoint_close(struct pf_checkpoint *ckpt);
/* What it is, and how much: the counts bound the indices of the getters below. */
PF_API void pf_checkpoint_info(const struct pf_checkpoint *ckpt,
                               struct pf_checkpoint_info *out_info);
/* Component i; components are sorted by name. */
PF_API void pf_checkpoint_component(const struct pf_checkpoint *ckpt, uint32_t i,
                                    struct pf_component_info *out_info);
/* Layer i of the whole checkpoint: component after component, each one's stem first, then its blocks in natural order. */
PF_API void pf_checkpoint_layer(const struct pf_checkpoint *ckpt, uint32_t i,
                                struct pf_layer_info *out_info);
/* Tensors are sorted by (component, layer, file offset): walking them in order streams the files. */
PF_API void pf_checkpoint_tensor(const struct pf_checkpoint *ckpt, uint32_t i,
                                 struct pf_tensor_info *out_info);
/* Index of a tensor by component and name, or -1. */
PF_API int64_t pf_checkpoint_find(const struct pf_checkpoint *ckpt, const char *component,
                                  const char *name);
/* 32 hex digits and NUL: what the bytes are, wherever they lie. Reads all of a file up to 64 MiB, else headers and a block of every
 * tensor, once. PF_E_CHANGED, PF_E_TRUNCATED, PF_E_IO, PF_E_NOMEM. */
PF_API int pf_checkpoint_content_id(struct pf_checkpoint *ckpt, char out_hex[33], pf_error *err);
/* PF_E_CHANGED or PF_E_TRUNCATED when a file is no longer the one that was opened. */
PF_API int pf_checkpoint_verify(const struct pf_checkpoint *ckpt, pf_error *err);

/* ---------------------------------------------------------------------------------------------- adapters */

/* One LoRA-family file, or a PEFT directory. Opening maps it, parses it, scans it for NaN and infinity, digests it. */
struct pf_adapter;

struct pf_adapter_info {
    const char *path;
    const char *family;  /* "lora", "loha", "lokr", "diff", or "mixed" */
    const char *dialect; /* "peft", "diffusers", "kohya", "native", "raw", "mixed" */
    const char *dtypes;  /* "F16" or "BF16,F32" */
    const char *digest;  /* 32 hex digits */
    uint32_t n_modules;  /* changes as spelled in the file: what pf_adapter_module lists */
    uint32_t n_keys;     /* tensors in the file */
    uint32_t rank_min, rank_max;
    double scale_min, scale_max; /* alpha / rank as the file says */
    uint64_t n_bytes;
};

struct pf_adapter_module {
    const char *name; /* the module path as spelled in the file, prefix included */
    const char *kind; /* "lora", "loha", "lokr", "diff", "diff_b", "bias" */
    uint32_t rank;
    bool has_alpha;
    double alpha;
    double scale;
};

/*
 * What the file says of itself is checked here, what it says of a base when it is composed. PF_E_NOTFOUND; PF_E_FORMAT;
 * PF_E_UNSUPPORTED (a family, field or file type, by name); PF_E_MISMATCH (factors against each other or against their config);
 * PF_E_CONFLICT (two spellings of one tensor); PF_E_NONFINITE.
 */
PF_API int pf_adapter_open(const char *path, struct pf_adapter **out_adapter, pf_error *err);
/* Drops one reference; compositions and engines hold their own. */
PF_API void pf_adapter_close(struct pf_adapter *adapter);
/* What the file is, as far as it says so without a base. */
PF_API void pf_adapter_info(const struct pf_adapter *adapter, struct pf_adapter_info *out_info);
/* Module i, in natural order of names; one that changes a weight and a bias comes twice. Past the end name and kind are "". */
PF_API void pf_adapter_module(const struct pf_adapter *adapter, uint32_t i,
                              struct pf_adapter_module *out_module);
/* Training metadata in file order (keys that begin with "ss_" or "modelspec.", and others); false past the end. Borrowed strings. */
PF_API bool pf_adapter_metadata(const struct pf_adapter *adapter, uint32_t i, const char **out_key,
                                const char **out_value);
/* Things worth telling a person ("no alpha and no config: scale 1 is assumed"); NULL past the end. */
PF_API const char *pf_adapter_note(const struct pf_adapter *adapter, uint32_t i);

/* ------------------------------------------------------------------------------------------ compositions */

/* A set of (adapter, alpha, strength, targets) resolved against one checkpoint, canonical, with a digest. */
struct pf_composition;

struct pf_lora {
    const struct pf_adapter *adapter; /* a reference is taken */
    double strength;                  /* required; 0 adds nothing; NaN and infinity are errors */
    bool has_alpha;
    double alpha; /* overrides every source in the file when has_alpha */
    /* Component, "a,b", or NULL / "all": every component that it addresses. */
    const char *target;
};

/* Merge precision: rounded to the base dtype, or kept in f32. */
enum { PF_MERGE_BASE = 0, PF_MERGE_F32 = 1 };

struct pf_composition_opts {
    uint32_t size;
    /* Keys that match nothing become a note; nothing matched at all stays an error */
    bool allow_unmatched;
    int32_t merge_dtype; /* PF_MERGE_* */
};

struct pf_composition_info {
    const char *digest; /* 32 hex digits: base content, entries, precision, arithmetic version */
    uint32_t n_entries;
    uint32_t n_keys_matched, n_keys_unmatched;
    uint32_t n_tensors_changed, n_layers_changed;
    uint64_t n_bytes_changed; /* of merged tensors, in their merged dtype */
    int32_t merge_dtype;
};

/*
 * Resolves every key, checks shapes, and proves that the result is finite. n_loras 0 gives the base.
 * PF_E_UNMATCHED, PF_E_MISMATCH, PF_E_AMBIGUOUS, PF_E_CONFLICT, PF_E_OVERFLOW, PF_E_UNSUPPORTED.
 */
PF_API int pf_composition_new(struct pf_checkpoint *ckpt, const struct pf_lora *loras,
                              size_t n_loras, const struct pf_composition_opts *opts,
                              struct pf_composition **out_comp, pf_error *err);
/* Drops one reference; views hold their own. */
PF_API void pf_composition_free(struct pf_composition *comp);
/* Its digest, and what it changes. */
PF_API void pf_composition_info(const struct pf_composition *comp,
                                struct pf_composition_info *out_info);
/* The i-th unmatched key, with the nearest base name (or NULL); false past the end. */
PF_API bool pf_composition_unmatched(const struct pf_composition *comp, uint32_t i,
                                     const char **out_key, const char **out_nearest);
/* Things worth telling a person, "FILE: text" or "FILE: warning: text"; NULL past the end. */
PF_API const char *pf_composition_note(const struct pf_composition *comp, uint32_t i);
/* Does the composition change tensor i of the checkpoint? */
PF_API bool pf_composition_changes(const struct pf_composition *comp, uint32_t i_tensor);

/* How much of what was asked for survives rounding to the base dtype: sum(applied x wanted) / sum(wanted^2). */
struct pf_fidelity {
    double survival; /* 1 when nothing is lost; for PF_MERGE_F32 1 up to its own rounding */
    /* Of the elements of changed tensors, those whose bits differ from the base */
    double fraction_changed;
    uint64_t n_elements; /* looked at: all up to 2^20, else rows at a fixed stride */
};
/* A survival below this is worth a warning: much of what was asked for is rounded away, and PF_MERGE_F32 would keep it. */
#define PF_SURVIVAL_WARN 0.9
/* Computed by the first call, which reads a part of the base, and remembered. PF_E_NOMEM, PF_E_TRUNCATED. */
PF_API int pf_composition_fidelity(struct pf_composition *comp, struct pf_fidelity *out_fidelity,
                                   pf_error *err);

/* --------------------------------------------------------------------------------------- views and readers */

/* What a reader holds: one composition, fixed, and where each tensor's bytes are. Reference counted. */
struct pf_view;

/* comp NULL means the base. The view holds what it needs; ckpt and comp may be closed while it lives. PF_E_INVALID: comp is of another
 * checkpoint. PF_E_NOMEM. */
PF_API int pf_view_open(struct pf_checkpoint *ckpt, struct pf_composition *comp,
                        struct pf_view **out_view, pf_error *err);
/* Drops one reference; readers hold their own. */
PF_API void pf_view_release(struct pf_view *view);
/* Of its composition: 32 hex digits. */
PF_API const char *pf_view_digest(const struct pf_view *view);

/* One thread's way into a view: scratch for merging, and the layer that it is in. One thread at a time. */
struct pf_reader;

/* Takes a reference to the view, and all the memory that reading will need. PF_E_NOMEM. */
PF_API int pf_reader_new(struct pf_view *view, struct pf_reader **out_reader, pf_error *err);
/* Leaves its layer first. */
PF_API void pf_reader_free(struct pf_reader *reader);

/*
 * A tensor is rows x cols: rows = shape[0] (1 for rank 0), cols = the product of the rest. A panel is n_rows x n_cols of
 * it, at most 4 MiB. Bytes come in the dtype of the merged tensor (PF_NATIVE) or as f32 (PF_AS_F32), packed, row by row.
 */
enum { PF_NATIVE = 0, PF_AS_F32 = 1 };

struct pf_panel {
    uint32_t i_tensor;
    int64_t row0, n_rows;
    int64_t col0, n_cols; /* n_cols 0: whole rows */
};

/*
 * At a layer border: the reader takes the newest placement of its composition and keeps it until it leaves or enters the
 * next layer, so that the bytes of one layer come from one place. Optional: a read outside any layer does this for itself.
 */
PF_API int pf_reader_enter(struct pf_reader *reader, uint32_t i_layer, pf_error *err);
/* Outside any layer it does nothing. */
PF_API void pf_reader_leave(struct pf_reader *reader);

/*
 * No allocation and no lock. PF_E_RANGE, PF_E_INVALID (out too small), PF_E_UNSUPPORTED (elements of less than a byte; PF_AS_F32 of another
 * dtype than F32, F16 and BF16), PF_E_TRUNCATED.
 */
PF_API int pf_reader_read(struct pf_reader *reader, const struct pf_panel *panel, int32_t format,
                          void *out, size_t n_out_bytes, pf_error *err);
/* The dtype of tensor i in this view: the base's, or F32 where merge_dtype f32 changes it; -1 past the end. */
PF_API int32_t pf_view_dtype(const struct pf_view *view, uint32_t i_tensor);
/* The tensor's mapped bytes when no arithmetic is needed, else NULL. Unaligned. Valid while the view lives. */
PF_API const void *pf_view_map(const struct pf_view *view, uint32_t i_tensor);
/*
 * Writes the whole tensor, as this view shows it, into the caller's buffer of exactly its size: one panel of scratch. Exact. PF_E_RANGE,
 * PF_E_INVALID (another size), PF_E_UNSUPPORTED, PF_E_NOMEM, PF_E_TRUNCATED: the buffer then holds some of it.
 */
PF_API int pf_apply_into(struct pf_view *view, uint32_t i_tensor, void *buffer,
                         size_t n_buffer_bytes, pf_error *err);

/* --------------------------------------------------------------------------------------------- progress */

/* Called from the calling thread now and then; returning false cancels (PF_E_CANCELLED). total 0: unknown. */
typedef bool (*pf_progress_fn)(void *ctx, const char *what, uint64_t done, uint64_t total);

/* ----------------------------------------------------------------------------------- merging to a checkpoint */

struct pf_merge_opts {
    uint32_t size;
    bool force;         /* replace an existing output */
    uint32_t n_threads; /* 0: one per CPU that this process may use */
    /* This process writes its share; n_parts 0: everything. i_part counts from 0 */
    uint32_t i_part, n_parts;
    pf_progress_fn progress;
    void *progress_ctx;
};

struct pf_merge_report {
    uint64_t n_bytes_read, n_bytes_written; /* by this process, this time */
    uint64_t peak_anon_bytes;
    double seconds;
    bool is_complete; /* false: other parts are still missing, OUT.partial/ stays */
    bool is_resumed;
};

/*
 * Writes the checkpoint with comp merged in, in the layout of the input (file, sharded, directory); untouched tensors are
 * byte-identical. Nothing stands under the final name until everything is durable; a killed run is continued by the same call.
 * comp NULL: a copy of the base. PF_E_EXISTS (also: parts of another merge stand there), PF_E_INVALID (out is the base, by whatever name),
 * PF_E_NOTFOUND (no directory to write in), PF_E_BUSY (another process writes it), PF_E_CHANGED, PF_E_TRUNCATED, PF_E_NOSPACE, PF_E_CANCELLED.
 */
PF_API int pf_merge(struct pf_checkpoint *ckpt, struct pf_composition *comp, const char *out_path,
                    const struct pf_merge_opts *opts, struct pf_merge_report *out_report,
                    pf_error *err);

/* ------------------------------------------------------------------------------------------- the DiT model */

/* A class-conditional diffusion transformer (diffusers' DiTTransformer2DModel), run on the CPU through a view. */
struct pf_model;

struct pf_model_info {
    uint32_t width, height, channels;
    uint32_t n_classes; /* without the empty class */
    uint32_t n_blocks, n_heads, head_dim, patch;
    uint32_t default_steps;
    double default_guidance;
};

struct pf_model_opts {
    uint32_t size;
    const char *component; /* NULL: "transformer" */
    uint32_t n_threads;    /* 0: one per CPU that this process may use */
};

/* PF_E_UNSUPPORTED for another _class_name, PF_E_NOTFOUND, PF_E_MISMATCH for tensors that disagree with the config. */
PF_API int pf_model_open(struct pf_checkpoint *ckpt, const struct pf_model_opts *opts,
                         struct pf_model **out_model, pf_error *err);
/* Not while it draws. */
PF_API void pf_model_close(struct pf_model *model);
/* Its sizes and defaults. */
PF_API void pf_model_info(const struct pf_model *model, struct pf_model_info *out_info);
/* "cat"; NULL where the class has no name, or past the end. */
PF_API const char *pf_model_class_name(const struct pf_model *model, uint32_t i_class);
/* The class that the words of a prompt pick ("a cat, please" -> 25). PF_E_NOTFOUND lists near matches. */
PF_API int pf_model_find_class(const struct pf_model *model, const char *prompt,
                               uint32_t *out_class, pf_error *err);

struct pf_generate_opts {
    uint32_t size;
    uint32_t n_images;
    const uint32_t *classes; /* n_images of them */
    uint64_t seed;           /* taken mod 2^32 */
    uint32_t n_steps;        /* 0: the model's default */
    double guidance_scale;   /* 0: the model's default; 1: no guidance pass */
    uint32_t batch;          /* images that share a pass; 0: chosen. Does not change any picture */
    pf_progress_fn progress;
    void *progress_ctx;
    /* Pictures of several requests in one call: NULL, or n_images of each. Picture i is then the one that a call with seed seeds[i]
     * draws at place indices[i]. */
    const uint64_t *seeds;
    const uint32_t *indices;
};

struct pf_generate_report {
    double seconds;
    uint64_t peak_anon_bytes, activation_bytes;
    uint64_t n_bytes_read;   /* from storage; 0 when the page cache had everything */
    uint64_t n_weight_bytes; /* that passed through the view */
};

/*
 * Draws n_images pictures with the weights of `view`. out_samples: n_images x channels x height x width f32 before
 * clamping, or NULL. out_rgb: n_images x height x width x 3, or NULL. One generation at a time per model, else PF_E_BUSY. PF_E_INVALID
 * (a class, the view of another checkpoint), PF_E_RANGE, PF_E_NOMEM, PF_E_CANCELLED, PF_E_TRUNCATED: out then holds some of the
 * pictures; PF_E_CHANGED: files changed while they were read, and out holds pictures of neither.
 */
PF_API int pf_generate(struct pf_model *model, struct pf_view *view,
                       const struct pf_generate_opts *opts, float *out_samples, uint8_t *out_rgb,
                       struct pf_generate_report *out_report, pf_error *err);

/* A picture of height x width x 3 bytes into a file, which appears whole. PF_E_INVALID, PF_E_RANGE, PF_E_IO, PF_E_NOSPACE. */
PF_API int pf_png_write(const char *path, const uint8_t *rgb, uint32_t width, uint32_t height,
                        pf_error *err);
/* The same bytes into memory. out NULL: *io_n_bytes becomes a size that suffices; else it is the room, and becomes the length. */
PF_API int pf_png_encode(const uint8_t *rgb, uint32_t width, uint32_t height, uint8_t *out,
                         size_t *io_n_bytes, pf_error *err);
/* n equal pictures, one behind the other in rgb, laid out in n_cols columns and enlarged `zoom` times. Errors as pf_png_write. */
PF_API int pf_sheet_write(const char *path, const uint8_t *rgb, uint32_t n, uint32_t width,
                          uint32_t height, uint32_t n_cols, uint32_t zoom, pf_error *err);

/* ------------------------------------------------------------------------------------------------ engine */

/*
 * Serving: one checkpoint, adapters under nicknames, and per component (target) a composition that can be set, merged again with
 * another factor, unmerged and deactivated while readers go on. A change publishes another view; nothing is written over the base
 * and no reader waits. Every function may be called from any thread; changes are done one after another.
 *
 *     set         replaces the composition of the named targets, leaves the others
 *     unmerge     publishes the base for the targets, remembers their composition
 *     merge       publishes what is remembered again, its strengths as set times a factor that replaces an earlier one
 *     deactivate  publishes the base and forgets
 *
 * A failed change publishes nothing: what was there is still there.
 */
struct pf_engine;

enum {
    PF_WAY_AUTO = 0, /* stream now, overlay when built, in place for resident layers */
    /* Merged files: the change waits for them; without a usable cache it streams and says so */
    PF_WAY_OVERLAY = 1,
    PF_WAY_STREAM = 2,  /* deltas are added while panels are read */
    PF_WAY_INPLACE = 3, /* resident layers are rewritten, the others stream */
};

struct pf_engine_opts {
    uint32_t size;
    int32_t way;           /* PF_WAY_* */
    const char *cache_dir; /* NULL: $PAGEFLIP_CACHE, else $XDG_CACHE_HOME/pageflip; "off": none */
    uint64_t cache_budget_bytes; /* 0: a quarter of the free space */
    uint64_t host_memory_bytes;  /* 0: what the system and its control groups leave */
    /* Private copies, reported apart. PF_E_NOMEM when they take more than is available. */
    uint32_t n_resident_layers;
    uint32_t n_threads;      /* of the builder, 256 at most; 0: half of the CPUs of this process */
    int64_t build_delay_ms;  /* 0: 2000; negative: never build in the background */
    const char *system_root; /* where proc and sys are looked for; NULL: "/". For tests */
    /* Of background builds, from a thread of the builder; returning false cancels the build, which then waits for the next change. It may
     * ask and change, but never close the engine. */
    pf_progress_fn progress;
    void *progress_ctx;
    /* Merged bytes per second that a background build writes at most, on average over a layer; 0: as fast as it can. */
    uint64_t build_bytes_per_s;
};

struct pf_change_opts {
    uint32_t size;
    bool allow_unmatched;
    int32_t merge_dtype; /* PF_MERGE_* */
    int32_t way;         /* PF_WAY_AUTO: the engine's */
    /* pf_engine_set calls it once, when the view is published and before it waits for an overlay, under the engine's lock: it may not call the engine. */
    void (*published)(void *ctx);
    void *published_ctx;
};

struct pf_engine_lora {
    const char *nickname;
    double strength;
    bool has_alpha;
    double alpha;
    const char *target; /* component, "a,b", or NULL / "all" */
};

struct pf_change_report {
    char composition[33];
    /* "base", "stream", "overlay", "inplace": how most changed layers are read now */
    const char *way;
    uint32_t n_tensors_changed, n_layers_changed;
    uint32_t n_keys_matched, n_keys_unmatched;
    double took_ms, effect_ms; /* the whole call; until the view was published */
    uint64_t peak_anon_bytes;
    struct pf_fidelity fidelity;
    char note[256]; /* why not as asked ("the cache is off"); empty when all is well */
};

/* Holds a reference to ckpt. An unusable cache is no error: see status. PF_E_INVALID, PF_E_NOMEM (also: resident layers take more than is
 * available), PF_E_IO. */
PF_API int pf_engine_open(struct pf_checkpoint *ckpt, const struct pf_engine_opts *opts,
                          struct pf_engine **out_engine, pf_error *err);
/* Ends background work; views that are out stay valid. A child of fork has no background thread: there it streams, and may be closed. */
PF_API void pf_engine_close(struct pf_engine *engine);

/* Another path or a changed file under a known nickname loads it anew; what acts keeps what it was made with. Errors are those of
 * pf_adapter_open; PF_E_INVALID: no nickname. */
PF_API int pf_engine_load(struct pf_engine *engine, const char *nickname, const char *path,
                          pf_error *err);
/* Ends a build of a composition that nobody has set any more, and waits for that. PF_E_BUSY while a view or a remembered composition uses
 * it, PF_E_NOTFOUND, PF_E_INVALID. */
PF_API int pf_engine_unload(struct pf_engine *engine, const char *nickname, pf_error *err);

/*
 * targets: component, "a,b", or NULL / "all"; n_loras 0 leaves nothing on them. Errors as pf_composition_new, and PF_E_NOTFOUND (a nickname
 * or target), PF_E_CHANGED and PF_E_TRUNCATED (files of base or adapters are not what was opened). out_report may be NULL, here and below.
 */
PF_API int pf_engine_set(struct pf_engine *engine, const struct pf_engine_lora *loras,
                         size_t n_loras, const char *targets, const struct pf_change_opts *opts,
                         struct pf_change_report *out_report, pf_error *err);
/* PF_E_STATE when nothing is remembered for the targets, PF_E_INVALID when the factor is not finite; else as pf_engine_set. */
PF_API int pf_engine_merge(struct pf_engine *engine, const char *targets, double factor,
                           struct pf_change_report *out_report, pf_error *err);
/* Where nothing is on, nothing changes. Errors as pf_engine_set: what stays on other targets is composed anew. */
PF_API int pf_engine_unmerge(struct pf_engine *engine, const char *targets,
                             struct pf_change_report *out_report, pf_error *err);
/* As pf_engine_unmerge. */
PF_API int pf_engine_deactivate(struct pf_engine *engine, const char *targets,
                                struct pf_change_report *out_report, pf_error *err);

/* The current view. Owned by caller: pf_view_release. Never NULL, never waits. */
PF_API struct pf_view *pf_engine_view(struct pf_engine *engine);
/* A view of a composition of the caller's own, beside the current one. Owned by caller: pf_view_release. Errors as pf_engine_set. */
PF_API int pf_engine_view_of(struct pf_engine *engine, const struct pf_engine_lora *loras,
                             size_t n_loras, const struct pf_change_opts *opts,
                             struct pf_view **out_view, pf_error *err);
/* How most of the changed layers of a view are read now: "base", "stream", "overlay" or "inplace". */
PF_API const char *pf_engine_way(struct pf_engine *engine, const struct pf_view *view);
/* Tells the builder that a generation used the current composition: three make it worth an overlay. */
PF_API void pf_engine_served(struct pf_engine *engine, const struct pf_view *view);
/* Waits until no background work is left or the time is over (PF_E_BUSY); starts a delayed build at once. From a progress function, and in
 * a child of fork, it does not wait. */
PF_API int pf_engine_settle(struct pf_engine *engine, uint64_t timeout_ms, pf_error *err);
/* Cancels a background build; the partial entry stays for the next. */
PF_API void pf_engine_cancel_build(struct pf_engine *engine);

struct pf_engine_status {
    char composition[33];
    char cache_dir[1024]; /* empty: none */
    char cache_note[512]; /* why there is no cache, or why the last build failed */
    uint64_t cache_budget_bytes;
    bool is_building;
    uint64_t n_built_bytes, n_build_bytes;
    uint32_t n_layers_kept, n_layers_mapped, n_layers_resident;
    uint64_t n_bytes_kept, n_bytes_resident;
    uint64_t available_bytes; /* for weights, by the memory plan */
    char plan_note[512];      /* the plan in a sentence: numbers and reasons */
    uint64_t anon_bytes;
    uint64_t n_changes, n_builds, n_adoptions;
    uint64_t n_build_failures, n_evictions;
    uint64_t n_merged_bytes; /* of all panels that this process merged, streamed or built */
    int32_t merge_dtype;     /* PF_MERGE_* of the composition */
};
/* All of it is in memory, but for anon_bytes, which the kernel is asked for. Waits while a change is being published. */
PF_API void pf_engine_status(struct pf_engine *engine, struct pf_engine_status *out_status);
/* What the cache holds, of every engine and process that shares it; 0: there is none. Lists the directory and tries its locks, so not
 * for every picture. */
PF_API uint64_t pf_engine_cache_bytes(struct pf_engine *engine);

struct pf_layer_status {
    const char *place;     /* "base", "stream", "overlay", "resident" */
    const char *residency; /* "kept", "mapped", "resident" */
    /* Of the tensors that the composition changes, in their merged dtype */
    uint64_t n_merged_bytes;
    uint64_t n_built_bytes; /* of those, what an overlay holds or a running build has written */
};
/* Of layer i of the checkpoint under the current composition. PF_E_RANGE. */
PF_API int pf_engine_layer_status(struct pf_engine *engine, uint32_t i_layer,
                                  struct pf_layer_status *out_status, pf_error *err);

/* Called under the engine's change lock: copy what you need, call nothing of the engine. */
typedef void (*pf_adapter_fn)(void *ctx, const char *nickname, const struct pf_adapter *adapter);
/* Every adapter that is loaded. */
PF_API void pf_engine_each_adapter(struct pf_engine *engine, pf_adapter_fn fn, void *ctx);
/* An adapter on one component, as it was set. */
struct pf_active_info {
    const char *component, *nickname, *path;
    double strength; /* as it acts now (factor applied) when is_merged, else as remembered */
    bool is_merged;
    bool has_alpha; /* an alpha was given instead of the adapter's own */
    double alpha;
};
/* As pf_adapter_fn; what info points to is valid during the call. */
typedef void (*pf_active_fn)(void *ctx, const struct pf_active_info *info);
/* Every adapter of every target, acting or remembered. */
PF_API void pf_engine_each_active(struct pf_engine *engine, pf_active_fn fn, void *ctx);

/* ----------------------------------------------------------------------------------------- overlay cache */

/*
 * The cache of merged weights from outside: what is in it, whether it is sound, and taking things out. `cache_dir` is a directory,
 * or NULL for the one that an engine would use; PF_E_STATE when there is none ("off"). A digest may be cut to its first 4 digits or more:
 * PF_E_NOTFOUND, PF_E_AMBIGUOUS; PF_E_INVALID for a text that is none. Safe beside engines that run, in other processes too.
 */
/* PF_E_RANGE: out_path is too small for it. */
PF_API int pf_cache_path(const char *cache_dir, char *out_path, size_t n_path_bytes, pf_error *err);

struct pf_cache_adapter {
    const char *path;
    double strength;
    bool has_alpha;
    double alpha;
    const char *target; /* component, or "all" */
};
struct pf_cache_entry {
    const char *digest; /* of the composition */
    /* "complete", "partial" (a build was killed or cancelled; the next one goes on), "building" */
    const char *state;
    bool is_in_use; /* by any process */
    uint64_t n_bytes;
    int64_t used_at_s; /* seconds since 1970 */
    /* Path of the checkpoint; NULL unless the entry was completed, like what follows */
    const char *base;
    const char *merge_dtype; /* "base", "f32" */
    const struct pf_cache_adapter *adapters;
    uint32_t n_adapters;
};
/* Returning false ends the list. What the entry points to is valid during the call. */
typedef bool (*pf_cache_fn)(void *ctx, const struct pf_cache_entry *entry);
/* By last use, oldest first. No directory, no entries. */
PF_API int pf_cache_list(const char *cache_dir, pf_cache_fn fn, void *ctx, pf_error *err);
/* Reads all of a complete entry and proves it; and the base tensors that it was made from, which are "proved", or the checkpoint is
 * "absent" or "replaced" by another one. PF_E_FORMAT and PF_E_MISMATCH name file and tensor. */
PF_API int pf_cache_verify(const char *cache_dir, const char *digest, const char **out_base,
                           pf_error *err);
/* PF_E_BUSY while any process uses or builds it. */
PF_API int pf_cache_evict(const char *cache_dir, const char *digest, pf_error *err);

struct pf_cache_clear_report {
    uint32_t n_evicted, n_left; /* left: in use */
    uint64_t n_bytes;
};
/* Takes out every entry that no process uses or builds, and forgets what is remembered of checkpoints. out_report may be NULL. */
PF_API int pf_cache_clear(const char *cache_dir, struct pf_cache_clear_report *out_report,
                          pf_error *err);

/* ---------------------------------------------------------------------------------------------- logging */

enum { PF_LOG_ERROR = 0, PF_LOG_WARN = 1, PF_LOG_INFO = 2, PF_LOG_DEBUG = 3 };
/* `line` has no newline. May be called by several threads at once, with locks of the library held: call nothing of it. */
typedef void (*pf_log_fn)(void *ctx, int level, const char *line);
/* Process-wide sink; NULL (the default) is silence. Call before other threads use the library. */
PF_API void pf_log_set(pf_log_fn fn, void *ctx, int max_level);

#ifdef __cplusplus
}
#endif
#endif
