package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Node is a node with a kubelet.
type Node struct {
	lab.Node

	cluster *Cluster
	machine *lab.Machine
}

// path returns a path in the folder that stands for the node's disk.
func (n *Node) path(elem ...string) string {
	return n.cluster.Path(append([]string{"nodes", n.Name}, elem...)...)
}

// script is what the first process of a node does. Nothing outside of its folder, and of its own
// mounts, changes, but for the control group of all nodes' pods: by default it weighs as much as one
// process of the machine, so that pods starve while others build or test there. On a node of their own
// they compete with nobody.
const script = `
hostname @NODE@
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/lock /run/state
mount --bind @STATE@ /run/state
mount -t tmpfs tmpfs /var/lib
mkdir -p @STATE@ /var/lib/kubelet /var/lib/containerd
mount --move /run/state @STATE@
mount --bind @DISK@/kubelet /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount --bind @DISK@/containerd /var/lib/containerd
mount -t tmpfs tmpfs /var/log
mkdir -p /var/log/pods /var/log/containers
respawn() { while :; do "$@" || true; echo "$1 has ended"; sleep 1; done; }
respawn containerd --config @DISK@/containerd.toml >>@LOGS@/@NODE@-containerd.log 2>&1 &
for group in /sys/fs/cgroup/cpu /sys/fs/cgroup/cpu,cpuacct; do
	if [ -e $group/cpu.shares ]; then
		mkdir -p $group/k8s.io && echo 10240 >$group/k8s.io/cpu.shares || echo "pods weigh as much as one process"
	fi
done
until ctr -n k8s.io images ls -q >/dev/null 2>&1; do sleep 0.2; done
if [ ! -e @DISK@/imported ]; then
	for image in @IMAGES@; do ctr -n k8s.io images import "$image"; done
	touch @DISK@/imported
fi
@CARRIER@
respawn @KUBELET@ --config=@DISK@/kubelet.yaml --kubeconfig=@KUBECONFIG@ --node-ip=@ADDRESS@ \
	--hostname-override=@NODE@ --root-dir=/var/lib/kubelet >>@LOGS@/@NODE@-kubelet.log 2>&1 &
while :; do wait || true; sleep 1; done
`

// flannel takes the place of the static routes to the pods of other nodes.
const flannel = `ip route | grep '^10\.244\..* via ' | while read -r route; do ip route del $route; done
NODE_NAME=@NODE@ respawn @FLANNELD@ -kubeconfig=@FLANNELCONFIG@ -net-config-path=@DISK@/flannel.json \
	>>@LOGS@/@NODE@-flanneld.log 2>&1 &
`

const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "@PAUSE@"
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "@PLUGINS@"
    conf_dir = "@DISK@/cni"
`

// kubeletConfig has no limits of resources: many machines for tests give no rights over them.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: @CA@}}
authorization: {mode: Webhook}
tlsCertFile: @CERT@
tlsPrivateKeyFile: @KEY@
clusterDomain: cluster.local
clusterDNS: [@DNS@]
cgroupDriver: cgroupfs
failCgroupV1: false
cgroupsPerQOS: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
evictionHard: {memory.available: "0%", nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%",
  imagefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
failSwapOn: false
maxPods: 200
resolvConf: @DISK@/resolv.conf
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
serializeImagePulls: false
`

// cniConfig has @PLUGIN@ for the plugin that links pods to the node: a bridge, which is that of the lab so
// that its address is known, or nothing but links.
const cniConfig = `{"cniVersion": "1.0.0", "name": "cluster", "plugins": [
 {@PLUGIN@, "ipMasq": false, "mtu": @MTU@,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "@PODS@", "gateway": "@GATEWAY@"}]],
   "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/run/cni-ipam"}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
`

const (
	bridgePlugin = `"type": "bridge", "bridge": "` + lab.PodBridge + `", "isGateway": true, "hairpinMode": true`
	ptpPlugin    = `"type": "ptp"`
)

// nodeFacts is what a node's files depend on.
type nodeFacts struct {
	node              lab.Node
	state, disk, logs string // folders
	ca                string
	carrier           string // Bridge, Routed or Flannel
	kubelet, flannel  lab.Credentials
	images            []string
	tools             tools
}

// nodeFiles returns the files on a node's disk, by their paths in it.
func nodeFiles(f nodeFacts) map[string]string {
	mtu, carrier, plugin := "1500", "", bridgePlugin
	switch f.carrier {
	case Flannel:
		mtu, carrier = "1450", flannel // VXLAN takes 50 bytes
	case Routed:
		plugin = ptpPlugin
	}
	fill := strings.NewReplacer(
		"@STATE@", f.state, "@DISK@", f.disk, "@LOGS@", f.logs, "@IMAGES@", strings.Join(f.images, " "),
		"@KUBELET@", f.tools.kubelet, "@KUBECONFIG@", f.kubelet.Kubeconfig, "@ADDRESS@", f.node.Addr.String(),
		"@NODE@", f.node.Name, "@PAUSE@", PauseImage, "@PLUGINS@", f.tools.plugins, "@CA@", f.ca,
		"@CERT@", f.kubelet.Cert, "@KEY@", f.kubelet.Key, "@DNS@", dnsAddr.String(), "@PLUGIN@", plugin,
		"@PODS@", f.node.PodNetwork.String(), "@GATEWAY@", f.node.Gateway().String(), "@MTU@", mtu,
		"@FLANNELD@", f.tools.flanneld, "@FLANNELCONFIG@", f.flannel.Kubeconfig)
	return map[string]string{
		"start.sh":                fill.Replace(strings.ReplaceAll(script, "@CARRIER@\n", carrier)),
		"containerd.toml":         fill.Replace(containerdConfig),
		"kubelet.yaml":            fill.Replace(kubeletConfig),
		"cni/10-cluster.conflist": fill.Replace(cniConfig),
		"flannel.json":            fmt.Sprintf(`{"Network": "%s", "Backend": {"Type": "vxlan"}}`, topology(0).PodNetwork),
		"resolv.conf":             "nameserver " + topology(0).LAN.Router.String() + "\n",
	}
}

// prepare writes the node's files.
func (n *Node) prepare() error {
	c := n.cluster
	f := nodeFacts{
		node: n.Node, state: c.Path(), disk: n.path(), logs: c.LogFolder(), ca: c.Path("ca.crt"),
		carrier: c.options.CNI, images: c.images, tools: c.tools,
	}
	var err error
	if f.kubelet, err = c.Credentials("system:node:"+n.Name, []string{"system:nodes"}, n.Addr); err != nil {
		return err
	}
	if f.flannel, err = c.Credentials("flannel-"+n.Name, []string{"system:masters"}); err != nil {
		return err
	}
	for _, dir := range []string{"kubelet", "containerd"} {
		if err := os.MkdirAll(n.path(dir), 0o755); err != nil {
			return err
		}
	}
	for path, text := range nodeFiles(f) {
		if err := c.write(n.path(path), text); err != nil {
			return err
		}
	}
	return nil
}

// Start boots the node.
func (n *Node) Start(ctx context.Context) (err error) {
	text, err := os.ReadFile(n.path("start.sh"))
	if err != nil {
		return err
	}
	n.machine, err = n.cluster.StartMachine(ctx, n.Name, n.Name, string(text))
	return err
}

// Kill cuts the node's power.
func (n *Node) Kill() error { return n.machine.Kill() }

// Reboot cuts the node's power and boots it again: with an empty kernel, and its disk.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.Kill(); err != nil {
		return err
	}
	if err := n.cluster.Remake(ctx, n.Name); err != nil {
		return err
	}
	return n.Start(ctx)
}

// register waits for the kubelet's Node and gives it its pod network and zone.
func (n *Node) register(ctx context.Context) error {
	patch := fmt.Sprintf(
		`{"metadata":{"labels":{"topology.kubernetes.io/zone":"zone-%d"}},"spec":{"podCIDR":"%s","podCIDRs":["%[2]s"]}}`,
		n.zone(), n.PodNetwork)
	return lab.WaitFor(ctx, n.cluster.options.Progress, n.Name+" to register", 10*time.Minute,
		func(ctx context.Context) error {
			if !n.machine.Running() {
				return errors.New("it has ended")
			}
			return n.cluster.mergePatch(ctx, n.Name, patch)
		})
}

// zone returns the number of the node's zone, 1 to 3: of node-1, node-4 and node-7 the first.
func (n *Node) zone() int { return (int(n.Name[len(n.Name)-1]-'0')-1)%3 + 1 }

// WaitReady waits until the Node is Ready.
func (n *Node) WaitReady(ctx context.Context) error {
	return lab.WaitFor(ctx, n.cluster.options.Progress, n.Name+" to be Ready", 3*time.Minute,
		func(ctx context.Context) error {
			node, err := n.cluster.Kube().CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, condition := range node.Status.Conditions {
				if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
					return nil
				} else if condition.Type == corev1.NodeReady {
					err = errors.New(condition.Message)
				}
			}
			return errors.Join(err, errors.New("not Ready"))
		})
}

// Shell returns the command line that enters the node, with its mounts, processes and network.
func (n *Node) Shell() string { return strings.Join(n.machine.Enter("bash"), " ") }

// Run runs a program on the node, with its mounts, processes and network.
func (n *Node) Run(ctx context.Context, argv ...string) (string, error) {
	argv = n.machine.Enter(argv...)
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", n.Name, err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// Processes returns the processes of that name on the node.
func (n *Node) Processes(name string) ([]int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		argv, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || filepath.Base(strings.Split(string(argv), "\x00")[0]) != name {
			continue
		}
		if below(pid, n.machine.PID) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// below reports whether a process descends from another.
func below(pid, ancestor int) bool {
	for pid > 1 {
		if pid == ancestor {
			return true
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 2 {
			return false
		}
		if pid, err = strconv.Atoi(fields[1]); err != nil {
			return false
		}
	}
	return false
}

// Signal sends a signal to the processes of that name on the node, which must be there.
func (n *Node) Signal(name string, sig syscall.Signal) error {
	pids, err := n.Processes(name)
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("%s: no process %s", n.Name, name)
	}
	errs := []error{err}
	for _, pid := range pids {
		errs = append(errs, syscall.Kill(pid, sig))
	}
	return errors.Join(errs...)
}
