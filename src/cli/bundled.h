/*
 * Where the bundled model and adapters are: `share/pageflip` beside the executable (the build tree has a link there), else
 * the data directory of an installation, relative to the executable, so that a tree can be moved. Paths of the
 * user always win over bundled names.
 */
#ifndef PF_CLI_BUNDLED_H
#define PF_CLI_BUNDLED_H

#include "base/err.h"

/* word NULL: the bundled model, which is looked up in data_dir (NULL: the one found as above). Any other text is a path already.
 * Paths are owned by the caller (mem_free). */
int bundled_model(const char *data_dir, const char *word, char **out_path, pf_error *err);
/* A path that exists, or a bare word that names a bundled adapter. PF_E_NOTFOUND with the nearest name and a hint. */
int bundled_adapter(const char *data_dir, const char *word, char **out_path, pf_error *err);
/* Names of the bundled adapters, sorted. Owned by caller: file_list_free. */
int bundled_adapter_names(const char *data_dir, char ***out_names, size_t *out_n, pf_error *err);

#endif
