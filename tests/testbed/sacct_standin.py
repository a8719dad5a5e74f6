"""Stand in for sacct where there is no database, with what slurmctld remembers.

Lists allocations, not steps, and only jobs younger than MinJobAge. Unknown options are errors: a filter that is
silently ignored would give a wrong answer. Standard library only, no imports from this package.
"""

import argparse
import re
import subprocess
import sys

# field of sacct: field of scontrol, None if it is computed below
FIELDS: dict[str, str | None] = {
    "jobid": None,
    "jobidraw": "JobId",
    "jobname": "JobName",
    "state": None,
    "exitcode": "ExitCode",
    "derivedexitcode": "DerivedExitCode",
    "reason": "Reason",
    "nodelist": None,
    "nnodes": "NumNodes",
    "ncpus": "NumCPUs",
    "alloccpus": "NumCPUs",
    "partition": "Partition",
    "account": None,
    "user": None,
    "qos": "QOS",
    "submit": "SubmitTime",
    "eligible": "EligibleTime",
    "start": "StartTime",
    "end": None,
    "elapsed": "RunTime",
    "timelimit": "TimeLimit",
    "workdir": "WorkDir",
    "constraints": "Features",
    "reqtres": "TRES",
    "alloctres": None,
    "comment": "Comment",
    "restarts": "Restarts",
    "priority": "Priority",
}
DEFAULT = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
ACTIVE = ("PENDING", "RUNNING", "SUSPENDED")


def jobs() -> list[dict[str, str]]:
    shown = subprocess.run(["scontrol", "show", "job", "--all", "-o"], capture_output=True, text=True, check=False)
    if shown.returncode:
        sys.exit(f"sacct: error: {shown.stderr.strip()}")
    # Values may contain blanks (JobName, Comment): a value ends before the next key.
    pair = re.compile(r"([A-Za-z][\w/:]*)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)")
    return [dict(pair.findall(line)) for line in shown.stdout.splitlines() if line.startswith("JobId=")]


def job_id(job: dict[str, str]) -> str:
    if "ArrayJobId" in job:
        task = job["ArrayTaskId"]
        return f"{job['ArrayJobId']}_{task}" if task.isdigit() else f"{job['ArrayJobId']}_[{task}]"
    if "HetJobId" in job:
        return f"{job['HetJobId']}+{job['HetJobOffset']}"
    return job["JobId"]


def state(job: dict[str, str]) -> str:
    # sacct has no such state: there a job is running until the epilogue has ended.
    return "RUNNING" if job["JobState"] in ("COMPLETING", "CONFIGURING") else job["JobState"]


def value(job: dict[str, str], field: str) -> str:
    known = FIELDS[field]
    if known:
        return job.get(known, "").replace("(null)", "")
    if field == "jobid":
        return job_id(job)
    if field == "state":
        return state(job)
    if field == "nodelist":
        nodes = job.get("NodeList", "")
        return nodes if nodes not in ("", "(null)") else "None assigned"
    if field == "account":
        return job.get("Account", "").replace("(null)", "")
    if field == "user":
        return job.get("UserId", "").partition("(")[0]
    if field == "end":  # scontrol shows the expected end of a running job
        return "Unknown" if state(job) in ACTIVE else job.get("EndTime", "Unknown")
    return "" if state(job) == "PENDING" else job.get("TRES", "")  # alloctres


def names(job: dict[str, str]) -> set[str]:
    """Return all names of the job that -j accepts."""
    found = {job["JobId"], job_id(job)} | {job[key] for key in ("ArrayJobId", "HetJobId") if key in job}
    tasks = re.sub(r"%\d+$", "", job.get("ArrayTaskId", ""))
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", tasks):
        found |= {f"{job['ArrayJobId']}_{i}" for i in range(int(first), int(last or first) + 1, int(step or 1))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="sacct", allow_abbrev=False, add_help=False)
    parser.add_argument("-j", "--jobs", action="append", default=[])
    parser.add_argument("-o", "--format", default=DEFAULT)
    parser.add_argument("-s", "--state", default="")
    parser.add_argument("-n", "--noheader", action="store_true")
    parser.add_argument("-P", "--parsable2", action="store_true")
    parser.add_argument("-p", "--parsable", action="store_true")
    parser.add_argument("--delimiter", default="|")
    for harmless in ("-X", "--allocations"), ("-a", "--allusers"), ("-D", "--duplicates"):
        parser.add_argument(*harmless, action="store_true")
    for window in ("-S", "--starttime"), ("-E", "--endtime"):  # slurmctld remembers an hour anyway
        parser.add_argument(*window)
    asked = parser.parse_args()

    columns = [column.partition("%")[0] for column in asked.format.split(",")]
    if unknown := [column for column in columns if column.lower() not in FIELDS]:
        sys.exit(f'sacct: fatal: Invalid field requested: "{unknown[0]}" (stand-in knows {", ".join(FIELDS)})')
    wanted = {name for listed in asked.jobs for name in listed.split(",")}
    states = set(filter(None, asked.state.upper().split(",")))
    rows = [
        [value(job, column.lower()) for column in columns]
        for job in jobs()
        if (not asked.jobs or names(job) & wanted) and (not states or state(job) in states)
    ]
    lines = rows if asked.noheader else [columns, *rows]
    end = asked.delimiter if asked.parsable else ""
    for line in lines:
        if asked.parsable or asked.parsable2:
            print(asked.delimiter.join(line) + end)
        else:
            print(" ".join(f"{cell:>12}" for cell in line))


if __name__ == "__main__":
    main()
