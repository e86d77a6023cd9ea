package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// debianPackages says which package each program comes from that the lab, or the agents in it,
// start.
var debianPackages = map[string]string{
	"ip":        "iproute2",
	"iptables":  "iptables",
	"nft":       "nftables",
	"conntrack": "conntrack",
	"etcd":      "etcd-server",
	"setpriv":   "util-linux",
}

// routerPackages says the same of the routers that tests of BGP and BFD talk to.
var routerPackages = map[string]string{
	"vtysh": "frr",
	"birdc": "bird2",
}

// reloadPackages says the same of what MetalLB changes the configuration of FRR with.
var reloadPackages = map[string]string{"vtysh": "frr", "/usr/lib/frr/frr-reload.py": "frr-pythontools"}

// balancerPackages says the same of the load balancers in front of a cluster.
var balancerPackages = map[string]string{"haproxy": "haproxy"}

// browserPackages says the same of the browser that looks at the dashboard.
var browserPackages = map[string]string{"chromium": "chromium"}

// nodePackages says the same of what the nodes of e2e/cluster run.
var nodePackages = map[string]string{
	"containerd": "containerd",
	"runc":       "runc",
	"nsenter":    "util-linux",
}

// modulePackages says the same of what e2e/vm unpacks the modules of other kernels with, and machinePackages of what it
// starts them in.
var (
	modulePackages  = map[string]string{"xz": "xz-utils"}
	machinePackages = map[string]string{"qemu-system-x86_64": "qemu-system-x86"}
)

// PrepareMachine installs what a virtual machine with another kernel needs and this machine does not have.
func PrepareMachine(ctx context.Context, progress func(string)) error {
	return errors.Join(ensurePrograms(ctx, modulePackages, progress), ensurePrograms(ctx, machinePackages, progress))
}

// PrepareNodes installs what the nodes of e2e/cluster run and this machine does not have:
// containerd, runc and the plugins of CNI, whose folder it returns.
func PrepareNodes(ctx context.Context, progress func(string)) (plugins string, err error) {
	if err := ensurePrograms(ctx, nodePackages, progress); err != nil {
		return "", err
	}
	if plugins, err = cniPlugins(); err == nil {
		return plugins, nil
	}
	const name = "containernetworking-plugins"
	if _, none := exec.LookPath("apt-get"); none != nil {
		return "", err
	}
	if err := watched(ctx, progress, "installing "+name, aptGet(ctx, "install", "-y", name)); err != nil {
		return "", err
	}
	return cniPlugins()
}

// cniPlugins looks where distributions put the plugins of CNI.
func cniPlugins() (string, error) {
	for _, dir := range []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"} {
		if _, err := os.Stat(filepath.Join(dir, "bridge")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("no plugins of CNI: install the package containernetworking-plugins")
}

// ensurePrograms finds the wanted programs and installs the packages of those that are missing.
func ensurePrograms(ctx context.Context, wanted map[string]string, progress func(string)) error {
	missing := missingPrograms(wanted)
	if len(missing) == 0 {
		return nil
	}
	packages := packagesOf(wanted, missing)
	complaint := fmt.Errorf("missing programs %s: install the packages %s", strings.Join(missing, ", "),
		strings.Join(packages, " "))
	if _, err := exec.LookPath("apt-get"); err != nil {
		return complaint
	}
	install := append([]string{"install", "-y", "--no-install-recommends"}, packages...)
	err := watched(ctx, progress, "installing "+strings.Join(packages, ", "), aptGet(ctx, install...))
	if err != nil {
		// A machine that never fetched the lists of packages knows none.
		err = watched(ctx, progress, "fetching the lists of packages", aptGet(ctx, "update"))
		err = errors.Join(err, watched(ctx, progress, "installing "+strings.Join(packages, ", "), aptGet(ctx, install...)))
	}
	if still := missingPrograms(wanted); len(still) > 0 {
		return errors.Join(complaint, err)
	}
	return nil
}

func aptGet(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "DPkg::Lock::Timeout=120"}, args...)...)
	// RUNLEVEL keeps package scripts from starting a service where there is no systemd.
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
	return cmd
}

func missingPrograms(wanted map[string]string) []string {
	var missing []string
	for _, program := range slices.Sorted(maps.Keys(wanted)) {
		if _, err := exec.LookPath(program); err == nil {
			continue
		}
		if program == "etcd" && assetFromEnvironment(program) != "" {
			continue
		}
		missing = append(missing, program)
	}
	return missing
}

func packagesOf(wanted map[string]string, programs []string) []string {
	var packages []string
	for _, p := range programs {
		packages = append(packages, wanted[p])
	}
	slices.Sort(packages)
	return slices.Compact(packages)
}
