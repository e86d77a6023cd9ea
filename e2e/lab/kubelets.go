package lab

import (
	"context"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// This file is what a cluster of real kubelets (e2e/cluster) needs of a lab whose
// [Options.Kubelets] is set: it starts the control plane and the network, and leaves the rest to
// others.

// Path returns a path in the lab's folder.
func (l *Lab) Path(elem ...string) string { return l.state.path(elem...) }

// Tool returns the path of the program that the lab's own pods run from, and of others that it has
// to build: see [Tool].
func (l *Lab) Tool(ctx context.Context, name string) (string, error) {
	return Tool(ctx, l.options.Repository, name, l.progress)
}

// Repository returns the root of the source tree.
func (l *Lab) Repository() string { return l.options.Repository }

// Credentials are the files by which a user proves to be one.
type Credentials struct{ Cert, Key, Kubeconfig string }

// Credentials writes a certificate of a user and a kubeconfig with it. The certificate is a
// server's at addresses too.
func (l *Lab) Credentials(user string, groups []string, addresses ...netip.Addr) (Credentials, error) {
	file := l.state.path(strings.ReplaceAll(user, ":", "-"))
	c := Credentials{Cert: file + ".crt", Key: file + ".key", Kubeconfig: file + ".kubeconfig"}
	var ips []net.IP
	for _, a := range addresses {
		ips = append(ips, a.AsSlice())
	}
	cert, key, err := l.control.ca.issue(time.Now(), pkix.Name{CommonName: user, Organization: groups}, ips, nil)
	if err != nil {
		return c, err
	}
	config := l.control.kubeconfig(&clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key})
	return c, errors.Join(writeFiles(map[string][]byte{c.Cert: cert, c.Key: key}),
		clientcmd.WriteToFile(*config, c.Kubeconfig))
}

// podSecurity has every namespace restricted that does not say otherwise, but for that of the cluster's
// own pods.
const podSecurity = `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: PodSecurity
  configuration:
    apiVersion: pod-security.admission.config.k8s.io/v1
    kind: PodSecurityConfiguration
    defaults: {enforce: restricted, enforce-version: latest}
    exemptions: {namespaces: [kube-system]}
`

// kubeletFlags are the flags of an API server that has kubelets. It makes their certificates.
func (c *controlPlane) kubeletFlags() ([]string, error) {
	toKubelets, err := c.lab.Credentials("kube-apiserver-kubelet-client", []string{"system:masters"})
	if err != nil {
		return nil, err
	}
	front, err := c.lab.Credentials("front-proxy-client", nil)
	admission := c.lab.state.path("admission.yaml")
	if err := writeFiles(map[string][]byte{admission: []byte(podSecurity)}); err != nil {
		return nil, err
	}
	return []string{
		"--admission-control-config-file=" + admission,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--kubelet-client-certificate=" + toKubelets.Cert, "--kubelet-client-key=" + toKubelets.Key,
		"--kubelet-preferred-address-types=InternalIP",
		// To webhooks in pods: no service proxy runs on the control plane.
		"--enable-aggregator-routing",
		"--requestheader-client-ca-file=" + c.lab.state.path("ca.crt"),
		"--requestheader-allowed-names=front-proxy-client", "--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + front.Cert, "--proxy-client-key-file=" + front.Key,
	}, err
}

// Machine is a process that is the first of namespaces of its own: with it all others in them end.
type Machine struct {
	process *process
	// PID is that of the first process.
	PID int
}

// StartMachine starts a script of bash on a host, as the first process of a machine with mounts,
// processes and a host name of its own. The output is appended to the log of that name.
func (l *Lab) StartMachine(ctx context.Context, name, host, script string, env ...string) (*Machine, error) {
	log, err := os.OpenFile(l.logPath(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// Not "ip netns exec", which puts another /sys over that with the control groups.
	cmd := exec.Command("nsenter", "--net="+filepath.Join(namespaceFolder, l.state.namespace(host)),
		"unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
		"bash", "-euc", script)
	cmd.Env = append([]string{minimalPath, "HOME=/root", l.state.mark}, env...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	m := &Machine{process: &process{cmd: cmd, done: make(chan struct{})}}
	go func() {
		m.process.err = cmd.Wait()
		close(m.process.done)
	}()
	children := fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", cmd.Process.Pid)
	err = WaitFor(ctx, l.progress, name, 20*time.Second, func(context.Context) error {
		if !m.Running() {
			return permanent{fmt.Errorf("ended at once: %s", tail(l.logPath(name), 5))}
		}
		text, err := os.ReadFile(children)
		if err != nil {
			return err
		}
		m.PID, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err
	})
	return m, err
}

// Running reports whether the machine has not ended.
func (m *Machine) Running() bool { return m.process.running() }

// Kill ends everything on the machine at once, as when its power is cut.
func (m *Machine) Kill() error {
	if !m.Running() {
		return nil
	}
	if err := syscall.Kill(m.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	<-m.process.done
	return nil
}

// Enter returns the command line that runs a program on the machine.
func (m *Machine) Enter(argv ...string) []string {
	return append([]string{"nsenter", "--target", strconv.Itoa(m.PID), "--net", "--mount", "--uts", "--ipc", "--pid"},
		argv...)
}

// Run starts a program on a host of the lab, for as long as the lab lasts. The output is appended
// to the log of that name.
func (l *Lab) Run(name, host string, argv ...string) error {
	_, err := l.startProcess(name, command{Host: host, Argv: argv})
	return err
}

// Remake makes the network namespace of a node anew, as when the node has booted. Nothing may run
// on it.
func (l *Lab) Remake(ctx context.Context, node string) error {
	n, ok := l.nodes[node]
	if !ok {
		return fmt.Errorf("no node %q", node)
	}
	// The kernel takes a namespace down some time later; its cable would be in the way until then.
	if err := batch(ctx, l.state.namespace(switchName), []string{"link delete " + portName(node, "eth0")}); err != nil {
		return err
	}
	if err := batch(ctx, "", []string{"netns delete " + l.state.namespace(node)}); err != nil {
		return err
	}
	return l.makeHost(ctx, planNode(l.cluster, n))
}

// removeCgroups removes the control groups of the containers that nodes in a lab's folder had;
// those that other containers use are not touched.
func removeCgroups(dir string) error {
	containers, err := filepath.Glob(filepath.Join(dir, "nodes/*/containerd/io.containerd.grpc.v1.cri/*/*"))
	if err != nil || len(containers) == 0 {
		return err
	}
	// One for each hierarchy, or one for all (version 2).
	parents, err := filepath.Glob("/sys/fs/cgroup/*/k8s.io")
	errs := []error{err}
	for _, parent := range append(parents, "/sys/fs/cgroup/k8s.io") {
		for _, container := range containers {
			err := syscall.Rmdir(filepath.Join(parent, filepath.Base(container)))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, fmt.Errorf("control group of a container: %w", err))
			}
		}
		_ = syscall.Rmdir(parent) // unless others are in it
	}
	return errors.Join(errs...)
}
