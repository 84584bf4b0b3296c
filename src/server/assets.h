/*
 * Files that are part of the program: the build turns src/server/page/ and openapi.json into the arrays behind these names
 * (cmake/PfEmbed.cmake). Constant, NUL-terminated beyond n.
 */
#ifndef PF_SERVER_ASSETS_H
#define PF_SERVER_ASSETS_H

#include <stddef.h>

struct asset {
    const unsigned char *p;
    size_t n;
};

extern const struct asset asset_index_html, asset_style_css, asset_app_js, asset_openapi_json;

#endif
