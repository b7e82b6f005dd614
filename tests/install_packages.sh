#!/usr/bin/env bash
# Install those Debian packages that the tests need and that are missing. Without root privileges, print their names and fail.
# Argument: file that lists the needed packages (default: tests/debian-packages.txt).
set -euo pipefail
list=${1:-$(dirname "$0")/debian-packages.txt}
mapfile -t needed < <(grep -v '^#' "$list")
if ! command -v dpkg-query >/dev/null; then
  echo "tests: this machine has no dpkg: the tests need Debian 12 or newer with the packages listed in $list" >&2
  exit 1
fi
installed=$(dpkg-query --show --showformat '${Package} ${db:Status-Status}\n' "${needed[@]}" 2>/dev/null | sed -n 's/ installed$//p' || true)
mapfile -t missing < <(comm -23 <(printf '%s\n' "${needed[@]}" | sort) <(sort <<<"$installed"))
[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "tests: missing Debian packages: ${missing[*]}; install them with: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
