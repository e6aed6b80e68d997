#!/bin/sh
# Installs what some tests talk to, where Debian's apt is at hand and may be used: Prometheus, and
# Chromium for the live page; and g++, with which the engine builds its native kernels when it first
# starts. Tests that need what is not there skip and say so. Nothing is started here.
set -u
missing=""
for package in prometheus chromium g++; do
    command -v "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null 2>&1 || { echo "no apt-get: tests that need$missing will skip"; exit 0; }
[ "$(id -u)" = 0 ] || { echo "not root: tests that need$missing will skip"; exit 0; }
# RUNLEVEL=1 keeps packages from starting their services.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
install() { apt-get install -y --no-install-recommends "$1" >/dev/null 2>&1; }
for package in $missing; do
    install "$package" || { apt-get update >/dev/null 2>&1 && install "$package"; } ||
        echo "apt-get could not install $package: tests that need it will skip"
done
