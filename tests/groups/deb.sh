# For groups that use a program of Debian without installing it, and with it a service: unpack_deb PACKAGE leaves it in
# build/groups/debs/PACKAGE. False when apt cannot fetch it here.
unpack_deb() {
    local dir=build/groups/debs/$1
    [ -e "$dir/.done" ] && return
    rm -rf "$dir"
    mkdir -p "$dir" || return
    (cd "$dir" && { apt-get download -q "$1" >apt.log 2>&1 || { apt-get update -qq && apt-get download -q "$1"; } >apt.log 2>&1; } &&
        dpkg -x "$1"_*.deb . && rm -f "$1"_*.deb && touch .done)
}
