"""Output of Slurm's commands for test_compare.py: 22.05 as recorded, newer versions in the form of public examples."""

from __future__ import annotations

from collections.abc import Mapping

from launchers.sites.slurm_facts import Cluster, NotReportedError

# Slurm 22.05.8, `scontrol -a -o show partition`; the columns of a site like Delta.
PARTITION_22_05 = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} QoS=N/A "
    "DefaultTime=00:30:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime={grace_s} Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime={time} MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes={nodes} PriorityJobFactor=1 PriorityTier=10 "
    "RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode={preempt} State=UP TotalCPUs=64 "
    "TotalNodes=1 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=64,mem=250G,node=1,billing=64,gres/gpu=4,gres/gpu:a40=4\n"
)
_PLAIN = {"default": "NO", "grace_s": 0, "time": "2-00:00:00", "preempt": "OFF"}
PARTITIONS_22_05 = "".join(
    PARTITION_22_05.format(**_PLAIN | changed)
    for changed in (
        {"name": "gpuA40x4", "nodes": "gpub001"},
        {"name": "gpuA40x4-interactive", "nodes": "gpub001", "time": "01:00:00"},
        {"name": "gpuA40x4-preempt", "nodes": "gpub001", "grace_s": 300, "preempt": "REQUEUE"},
        {"name": "gpuA100x4", "nodes": "gpua[001-002]", "default": "YES"},
        {"name": "gpuH200x8", "nodes": "gpuh001"},
        {"name": "cpu", "nodes": "cn001"},
    )
)
NODES_22_05 = """\
cpu|cn001|128|256000|(null)|work,projects
gpuA100x4*|gpua001|64|256000|gpu:a100:4|a100,work,projects
gpuA100x4*|gpua002|64|256000|gpu:a100:4|a100,work,projects
gpuA40x4-interactive|gpub001|64|256000|gpu:a40:4|a40,work,projects
gpuA40x4|gpub001|64|256000|gpu:a40:4|a40,work,projects
gpuA40x4-preempt|gpub001|64|256000|gpu:a40:4|a40,work,projects
gpuH200x8|gpuh001|96|2000000|gpu:h200:8|h200,work,projects
"""
CONFIG_22_05 = """\
Configuration data as of 2026-11-21T19:03:22
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = delta
DefMemPerCPU            = 1000
JobRequeue              = 0
MaxArraySize            = 1001
PowerPlugin             =
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:10:00
SlurmctldHost[0]        = login(127.0.0.1)
SlurmctldParameters     = (null)
SLURM_VERSION           = 22.05.8
TrackWCKey              = No

Cgroup Support Configuration:
JobRequeue              = 1

Slurmctld(primary) at login is UP
"""
ASSOCIATIONS = "bbxx-delta-gpu|normal,high|normal|500\nbbxx-delta-cpu|normal|normal|\n"
QOS = "normal|00:00:00||\nhigh|00:02:00|1-00:00:00|100\n"

# The form of 24.05 and later: several lines, more keys, GRES with sockets, device names as types, billing weights.
PARTITIONS_NEW = """\
PartitionName=gpu
   AllowGroups=ALL DenyAccounts=closed AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=gpu_limits
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=40 MaxCPUsPerSocket=UNLIMITED
   Nodes=g[01-03]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=144 TotalNodes=3 SelectTypeParameters=NONE
   JobDefaults=DefMemPerGPU=81920
   DefMemPerCPU=4000 MaxMemPerCPU=8000
   TRES=cpu=144,mem=1080G,node=3,billing=144,gres/gpu=6
   TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=10,GRES/gpu:nvidia_a100-pcie-40gb=20
   ResumeTimeout=GLOBAL SuspendTimeout=GLOBAL SuspendTime=GLOBAL PowerDownOnIdle=NO

PartitionName=old
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   MaxTime=4-00:00:00 MaxCPUsPerNode=UNLIMITED GraceTime=0 PreemptMode=OFF State=DRAIN
   TRESBillingWeights=CPU=1.0,GRES/gpu=10
"""
NODES_NEW = """\
gpu*|g01|48|368640|gpu:nvidia_a100-pcie-40gb:2(S:0,1)|a100
gpu*|g02|48|368640|gpu:nvidia_a100-pcie-40gb:2(S:0,1),shard:nvidia_a100-pcie-40gb:8(S:0,1)|a100
gpu*|g03|40|184320|gpu:nvidia_a40:no_consume:2(S:0-1)|a40
old|o01|32+|128000+|gpu:4|(null)
"""
CONFIG_NEW = """\
Configuration data as of 2026-11-21T19:03:22
AccountingStorageEnforce = associations,limits,qos,safe,wckeys
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = grace
JobRequeue              = 1
MaxArraySize            = 10001
PreemptMode             = REQUEUE
PreemptParameters       = (null)
PreemptType             = preempt/qos
PreemptExemptTime       = NONE
SlurmctldParameters     = enable_configless
SLURM_VERSION           = 24.05.4
TrackWCKey              = Yes
"""
ASSOCIATIONS_NEW = "123456789012|normal|normal|\n"
QOS_NEW = "normal|00:05:00||200\ngpu_limits|00:00:00|2-00:00:00|\n"

OUTPUTS_22_05 = {
    "config": CONFIG_22_05,
    "partitions": PARTITIONS_22_05,
    "nodes": NODES_22_05,
    "associations": ASSOCIATIONS,
    "qos": QOS,
}
OUTPUTS_NEW = {
    "config": CONFIG_NEW,
    "partitions": PARTITIONS_NEW,
    "nodes": NODES_NEW,
    "associations": ASSOCIATIONS_NEW,
    "qos": QOS_NEW,
}


TOPICS = {"config": "config", "partition": "partitions", "-N": "nodes", "assoc": "associations", "qos": "qos"}


def cluster(outputs: Mapping[str, str], **changed: str | None) -> Cluster:
    """Return a cluster whose commands print these outputs; None: that command failed."""
    texts: dict[str, str | None] = {**outputs, **changed}
    failed = NotReportedError("`it` failed: no")

    def run(*command: str) -> str | NotReportedError:
        if command == ("id", "-un"):
            return texts.get("user") or ("" if "user" in texts else "me")
        (topic,) = (topic for word, topic in TOPICS.items() if word in command)
        text = texts[topic]
        return failed if text is None else text

    return Cluster(run)
