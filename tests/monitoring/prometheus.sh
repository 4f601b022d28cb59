#!/bin/sh
# Puts Debian's prometheus and promtool into a folder, without root: the package is downloaded by apt and unpacked there.
#
#   prometheus.sh FOLDER     leaves FOLDER/bin/prometheus and FOLDER/bin/promtool
#
# They need libc and nothing else. A machine without apt needs them on its PATH; then nobody calls this.
set -eu

folder=$1
fail() {
  echo "prometheus.sh: $1" >&2
  echo "prometheus.sh: put prometheus and promtool, 2.42 or later, on the PATH by other means, and try again" >&2
  exit 1
}

command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
  fail "no prometheus and promtool on the PATH, and no apt-get and dpkg to get Debian's package with"

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lists/partial" "$folder/cache/archives/partial"
cd "$folder"

# The system's package lists if there are some; else lists of our own, which need no root either.
if ! apt-get download -qq prometheus >apt.log 2>&1; then
  own="-o Dir::State::lists=$PWD/lists -o Dir::Cache=$PWD/cache -o APT::Sandbox::User="
  # shellcheck disable=SC2086  # several words on purpose
  { apt-get $own update -qq && apt-get $own download -qq prometheus; } >>apt.log 2>&1 ||
    { tail -n 5 apt.log >&2; fail "apt-get cannot download the package prometheus"; }
fi
dpkg -x prometheus_*.deb unpacked
for program in prometheus promtool; do
  ln -s "../unpacked/usr/bin/$program" "bin/$program"
  "bin/$program" --version >/dev/null 2>run.log || { cat run.log >&2; fail "$program of the package does not run here"; }
done
rm -rf lists cache prometheus_*.deb
