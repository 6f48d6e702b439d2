#!/usr/bin/env bash
# A real but disposable Slurm of a few virtual nodes on this machine, for tests and for trying
# `laminar submit`.
#
#   local_slurm.sh start DIR [--nodes 4] [--cpus 4] [--mem 4096] [--gpus 0] [--conf FILE]
#   local_slurm.sh stop DIR              end all jobs and daemons, whatever state they are in
#   local_slurm.sh env DIR               print `export SLURM_CONF=...`, for eval
#   local_slurm.sh kill-node DIR NODE    a power failure: all that runs on NODE dies at once
#   local_slurm.sh kill-slurmd DIR NODE  only the daemon of NODE dies, its jobs live on
#   local_slurm.sh start-node DIR NODE   start NODE again, and wait until it takes jobs
#
# Needs   root; slurmctld slurmd slurm-client munge (Debian: apt-get install these four), util-linux
# Reads   DIR/lab, what `start` was asked for; FILE, further lines for slurm.conf
# Writes  DIR, at most 64 characters long: configuration, state and logs of all daemons
# Starts  munged, slurmctld and a slurmd for each node n1, n2, ...
#
# A node is a namespace of processes, mounts and names, whose first process is its power switch:
# `hostname` is the node's there, and n1, n2, ... are 127.0.1.1, 127.0.1.2, ... . The network and
# /dev/shm are the machine's. Nodes claim processors and memory that need not be there; their GPUs are
# links to /dev/null, of which jobs see the numbers in CUDA_VISIBLE_DEVICES. Times are shorter than on
# a cluster: a node is down after 10 s of silence (300), a requeued job waits 5 s (120).
set -euo pipefail
umask 022
PATH=$PATH:/usr/sbin:/sbin
FREEZER=/sys/fs/cgroup/freezer
PORTS_FROM=21000
WAIT_S=30

die() { echo "local_slurm.sh: $*" >&2; exit 1; }
usage() { sed -n '5,10s/^# *//p' "$0" >&2; exit 2; }
slurm() { SLURM_CONF=$dir/slurm.conf timeout 15 "$@"; }
node_names() { seq -f 'n%g' "$nodes"; }

# --- processes -------------------------------------------------------------------------------------

lives() { # PID: alive and not a zombie
  [[ -n "${1-}" ]] && grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$1/status"
}

pid_in() { # FILE: the living process of a pid file
  local pid
  pid=$(cat "$dir/run/$1" 2>/dev/null) && lives "$pid" && echo "$pid"
}

first_process() { # NODE: the child of its `unshare`
  local outer
  outer=$(pid_in "$1.node") && pgrep -P "$outer" | head -n 1 | grep .
}

slurmd_of() { # NODE
  local first
  first=$(first_process "$1") && pgrep -P "$first" -x slurmd | head -n 1 | grep .
}

until_gone() { # PID...: waits, and kills them after WAIT_S
  local pid end=$((SECONDS + WAIT_S))
  for pid in "$@"; do
    while lives "$pid"; do
      ((SECONDS < end)) || kill -KILL "$pid" 2>/dev/null || true
      sleep 0.05
    done
  done
}

kill_node() { # NODE
  local outer first
  outer=$(pid_in "$1.node") || return 0
  first=$(first_process "$1") && kill -KILL "$first"
  until_gone "$outer"
  rm -f "$dir/run/$1.node"
}

daemon() { # COMMAND...: without our lock and our output
  SLURM_CONF=$dir/slurm.conf "$@" </dev/null >>"$dir/log/start.log" 2>&1 9>&- ||
    { tail -n 5 "$dir/log/start.log" >&2; die "$1 does not start; its log is in $dir/log"; }
}

boot() { # NODE: turns its power on if it is off, and starts its slurmd
  local first
  mkdir -p "$dir/spool/$1"
  if first=$(first_process "$1"); then
    daemon nsenter -t "$first" -p -m -u slurmd -N "$1"
    return
  fi
  # bash adopts the orphans of the node; the kernel ends them all when bash is killed
  SLURM_CONF=$dir/slurm.conf setsid unshare --uts --mount --pid --fork --kill-child=KILL bash -c '
    mount --make-rprivate / && mount -t proc proc /proc && mount --bind "$1/hosts" /etc/hosts
    hostname "$2" && slurmd -N "$2" || exit
    while :; do sleep 3600 & wait; done
  ' bash "$dir" "$1" </dev/null >>"$dir/log/start.log" 2>&1 9>&- &
  echo $! >"$dir/run/$1.node"
  disown
}

until_idle() { # NODE...: waits until all of them take jobs
  local node end=$((SECONDS + WAIT_S)) states
  for node in "$@"; do
    until states=$(slurm sinfo -h -N -n "$node" -o %T 2>&1) && grep -qE '^(idle|mixed|allocated)$' <<<"$states"; do
      ((SECONDS < end)) || die "$node takes no jobs: $states; the logs are in $dir/log"
      sleep 0.1
    done
  done
}

# --- configuration ---------------------------------------------------------------------------------

free_ports() { # N: prints the first of N consecutive free ports
  local from taken
  taken=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '$4 == "0A" { print $2 }' |
    sed 's/.*://' | while read -r port; do echo $((16#$port)); done)
  for ((from = PORTS_FROM; from < 32000; from += 100)); do
    grep -qxFf <(seq "$from" $((from + $1 - 1))) <<<"$taken" || { echo "$from"; return; }
  done
  die "no $1 free ports from $PORTS_FROM on"
}

claim_cgroups() { # one Slurm at a time has these names; the kernel then kills whole steps
  local node made=()
  [[ -w $FREEZER/cgroup.procs ]] || return 1
  for node in $(node_names); do
    mkdir "$FREEZER/slurm_$node" 2>/dev/null || { rmdir "${made[@]}" 2>/dev/null; return 1; }
    made+=("$FREEZER/slurm_$node")
  done
}

write_conf() {
  local port=$1 list="n[1-$nodes]" addresses="127.0.1.[1-$nodes]" node
  for node in $(node_names); do echo "127.0.1.${node#n} $node"; done | cat - /etc/hosts >"$dir/hosts"
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupAutomount=no >"$dir/cgroup.conf"
  if ((gpus)); then
    mkdir -p "$dir/dev"
    for ((i = 0; i < gpus; i++)); do
      ln -sfn /dev/null "$dir/dev/gpu$i"
      echo "Name=gpu Flags=nvidia_gpu_env File=$dir/dev/gpu$i"
    done >"$dir/gres.conf"
  fi
  cat - ${conf:+"$conf"} >"$dir/slurm.conf" <<END
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
# srun must listen on all addresses: slurmstepd calls back to where a connection came from, 127.0.0.1
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld
SlurmdPidFile=$dir/run/%n.slurmd
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/%n.log
ProctrackType=proctrack/$proctrack
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=64
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
MessageTimeout=5
BatchStartTimeout=10
CompleteWait=0
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2,sched_interval=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
$( ((gpus)) && echo GresTypes=gpu)
NodeName=$list NodeAddr=$addresses Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=$mem$( ((gpus)) && echo " Gres=gpu:$gpus") State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes=ALL PriorityTier=20 PreemptMode=OFF
END
}

# --- commands --------------------------------------------------------------------------------------

start() {
  nodes=4 cpus=4 mem=4096 gpus=0 conf=""
  while (($#)); do
    case $1 in
      --nodes | --cpus | --mem | --gpus)
        [[ "${2-}" =~ ^[0-9]+$ ]] || die "$1 takes a number, not '${2-}'"
        printf -v "${1#--}" %s "$2" ;;
      --conf) conf=$2 ;;
      *) usage ;;
    esac
    shift 2
  done
  ((nodes >= 2 && nodes <= 64)) || die "--nodes $nodes: from 2 to 64"
  [[ $(id -u) = 0 ]] || die "nodes are namespaces, which root makes"
  local program
  for program in munged slurmctld slurmd sbatch unshare nsenter pgrep; do
    command -v "$program" >/dev/null ||
      die "$program is not here: apt-get install slurmctld slurmd slurm-client munge procps"
  done
  # a socket name has at most 107 characters: DIR/spool/n64/n64_1000000.4294967295
  [[ ${#dir} -le 64 && $dir =~ ^[A-Za-z0-9_./+-]+$ ]] || die "choose a shorter, plainer DIR than $dir"
  [[ -f $dir/lab ]] && die "$dir has a Slurm already: stop it first, or choose another DIR"
  mkdir -p "$dir"/{munge,state,spool,log,run}
  chmod 755 "$dir"
  proctrack=pgid
  ! claim_cgroups || proctrack=cgroup
  local name port
  for name in nodes gpus proctrack; do echo "$name=${!name}"; done >"$dir/lab"
  port=$(free_ports $((nodes + 1)))
  write_conf "$port"
  (umask 077; head -c 128 /dev/urandom >"$dir/munge/key")
  # --force: directories above that others may write, as /tmp, are a warning
  daemon munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
    --pid-file="$dir/run/munged" --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"
  daemon slurmctld
  for name in $(node_names); do boot "$name"; done
  until_idle $(node_names)
  # slurmd calls slurmctld: an idle node is not necessarily reachable yet
  slurm srun -N "$nodes" -D / --mem=1 true || die "no task runs on all nodes; the logs are in $dir/log"
  until_idle $(node_names)
  echo "$nodes nodes; eval \"\$($0 env $dir)\""
}

stop() {
  [[ -f $dir/lab ]] || return 0
  local name pid
  slurm scancel --quiet --state=PENDING,RUNNING,SUSPENDED 2>/dev/null || true
  for name in slurmctld munged; do
    ! pid=$(pid_in "$name") || { kill "$pid"; until_gone "$pid"; }
  done
  for name in $(node_names); do
    kill_node "$name"
    [[ $proctrack != cgroup ]] || find "$FREEZER/slurm_$name" -depth -type d -exec rmdir {} \; 2>/dev/null || true
  done
  rm -f "$dir/lab"
}

(($# >= 2)) || usage
command=$1 dir=$(realpath -m "$2")
shift 2
if [[ $command != start && $command != stop ]]; then
  [[ -f $dir/lab ]] || die "no Slurm was started in $dir"
fi
[[ ! -d $dir ]] || { exec 9>"$dir/.lock"; flock -w 60 9 || die "another command is at work in $dir"; }
[[ ! -f $dir/lab ]] || source "$dir/lab"
case $command in
  kill-node | kill-slurmd | start-node) node_names | grep -qxF -- "${1-}" || die "no node is called '${1-}'" ;;
esac
case $command in
  start) start "$@" ;;
  stop) stop ;;
  env) echo "export SLURM_CONF=$dir/slurm.conf" ;;
  kill-node) kill_node "$1" ;;
  kill-slurmd) pid=$(slurmd_of "$1") && kill -KILL "$pid" && until_gone "$pid" ;;
  start-node) slurmd_of "$1" >/dev/null || boot "$1"; until_idle "$1" ;;
  *) usage ;;
esac
