#!/bin/sh
# Installs the services that some tests talk to, where Debian's apt is at hand and may be used.
# Tests that need a service that is not there skip and say so. Nothing is started here.
set -u
command -v prometheus >/dev/null 2>&1 && exit 0
command -v apt-get >/dev/null 2>&1 || { echo "no apt-get: tests against Prometheus will skip"; exit 0; }
[ "$(id -u)" = 0 ] || { echo "not root: tests against Prometheus will skip"; exit 0; }
# RUNLEVEL=1 keeps the package from starting its service.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get install -y --no-install-recommends prometheus >/dev/null 2>&1 ||
    { apt-get update >/dev/null 2>&1 && apt-get install -y --no-install-recommends prometheus >/dev/null 2>&1; } ||
    echo "apt-get could not install prometheus: tests against it will skip"
