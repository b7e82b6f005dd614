#!/bin/bash
# The first process of one lab host: builds a copy-on-write root over the machine's root, moves into it and starts sshd.
# Arguments: the lab's directory, the host's name, then the directories that need an overlay of their own, because the overlay
# of / does not contain them.
# Started by hosts.py in fresh mount, UTS, IPC and PID namespaces. The host runs until its standard input closes, which
# happens when the process that created the lab exits or is killed.
set -euo pipefail
umask 022
lab=$1 name=$2 stage=$1/$2 root=$1/$2/root
shift 2

read -r pid _ </proc/self/stat # /proc is still that of the machine, so this is the PID in the machine's namespace
echo "$pid" >"$lab/$name.pid"
hostname "$name"

# --- files: everything that a host writes is in a tmpfs (this one or those below). It disappears with the host's mount namespace.
mount -t tmpfs -o size=2g,mode=755 tmpfs "$stage"
cd "$stage"
layers=0
# Argument: a directory of the machine. The host gets a copy-on-write view of it at the same path. The paths in the mount options
# are relative, because $stage may contain commas, which separate mount options.
copy_on_write() {
  layers=$((layers + 1))
  mkdir -p "up$layers" "work$layers" "$root$1"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=up$layers,workdir=work$layers" "$root$1"
}
# Arguments: mode and path of a directory of the host. Mounts an empty tmpfs on it.
private() { mkdir -p "$root$2" && mount -t tmpfs -o "mode=$1" tmpfs "$root$2"; }
mkdir root
copy_on_write /
private 700 /root # the shell start-up files of a real /root would slow down every SSH command
private 755 /run
private 1777 /tmp
for path in "$@"; do copy_on_write "$path"; done
if [ -d "$root$lab" ]; then private 700 "$lab"; fi # hides the lab's private key from the host
mkdir -p "$root/run/sshd" "$root/run/lock" "$root/mnt"

# --- kernel file systems: the host has its own processes, terminals and network devices. It sees no disk and cannot change the
# settings of the machine.
private 755 /dev
mkdir "$root/dev/pts" "$root/dev/shm"
for device in "null 3" "zero 5" "full 7" "random 8" "urandom 9"; do
  mknod -m 666 "$root/dev/${device% *}" c 1 "${device#* }"
done
mknod -m 666 "$root/dev/tty" c 5 0
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for stream in "stdin 0" "stdout 1" "stderr 2"; do ln -s "/proc/self/fd/${stream#* }" "$root/dev/${stream% *}"; done
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount --bind "$root/proc/sys/net" "$root/proc/sys/net" # part of the network namespace, so the host may write to it
mount -o remount,bind,ro "$root/proc/sys"
cat /proc/sys/kernel/random/uuid >"$root/run/boot_id"
mount --bind "$root/run/boot_id" "$root/proc/sys/kernel/random/boot_id"

mount -t sysfs -o ro sysfs "$root/sys"
if [ -d "$root/sys/fs/cgroup" ]; then mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"; fi

# --- identity
echo "$name" >"$root/etc/hostname"
# These files are removed before they are written, because they may be symbolic links into directories that `private` emptied.
rm -f "$root/etc/machine-id" "$root/etc/resolv.conf" "$root/etc/hosts" "$root"/etc/ssh/ssh_host_*
tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
if [ -f "$root/var/lib/dbus/machine-id" ]; then ln -sf /etc/machine-id "$root/var/lib/dbus/machine-id"; fi
: >"$root/etc/resolv.conf"
cp "$lab/hosts" "$root/etc/hosts"

# --- SSH
for file in .bashrc .profile .bash_profile; do : >"$root/root/$file"; done
: >"$root/etc/bash.bashrc" # Debian's bash reads it for SSH commands too
sed -i 's/^root:[^:]*:/root:*:/' "$root/etc/shadow" # without PAM, sshd rejects a locked account ("!") even with a valid key
install -D -m 600 "$lab/key.pub" "$root/root/.ssh/authorized_keys"
chmod 700 "$root/root/.ssh"
ssh-keygen -q -t ed25519 -N '' -C "root@$name" -f "$root/etc/ssh/ssh_host_ed25519_key"
cat >"$root/etc/ssh/sshd_config" <<'C'
Port 22
Port 2222
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 100:30:200
# OpenSSH's default key exchange is slower.
KexAlgorithms curve25519-sha256
Subsystem sftp internal-sftp
C

cd "$root"
pivot_root . mnt
umount -l /mnt
cd /
# Bash starts background programs with SIGINT ignored, which every program run over SSH would inherit.
env --default-signal /usr/sbin/sshd -D -e </dev/null &
read -r || true # until standard input closes; meanwhile bash reaps orphans, as PID 1 must
