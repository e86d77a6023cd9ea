package e2e

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// contender is a proxy in one of its modes.
type contender struct{ program, mode string }

func (c contender) String() string { return c.program + " " + c.mode }

// contest is where contenders meet the same objects and the same packets.
type contest struct {
	site       *cases.Site
	kubeconfig string
	programs   map[string]string
	folder     string
}

// run starts a contender as a case asks for, on a node without rules, and returns what ends it.
func (o *contest) run(t *testing.T, who contender, config plan.Config) (stop func()) {
	t.Helper()
	argv := []string{"ip", "netns", "exec", o.site.Node.Name, o.programs[who.program]}
	if who.program == "kube-proxy" {
		argv = append(argv, "--config="+o.kubeProxyConfig(t, who.mode, config))
	} else {
		argv = append(argv, o.landfallFlags(who.mode, config)...)
	}
	var log bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			lines := strings.Split(log.String(), "\n")
			t.Logf("the last lines of %s:\n%s", who, strings.Join(lines[max(0, len(lines)-15):], "\n"))
		}
		o.site.Node.Run(t, "nft", "flush", "ruleset")
		o.site.Node.Run(t, "conntrack", "-F")
	}
	t.Cleanup(stop)
	return stop
}

// kubeProxyConfig writes kube-proxy's configuration for what a case's rules depend on.
func (o *contest) kubeProxyConfig(t *testing.T, mode string, config plan.Config) string {
	t.Helper()
	dialect := map[string]any{"masqueradeAll": config.MasqueradeAll, "masqueradeBit": config.MasqueradeBit,
		"minSyncPeriod": "50ms"}
	c := map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
		"mode": mode, "hostnameOverride": cases.Here, "clientConnection": map[string]any{"kubeconfig": o.kubeconfig},
		"nodePortAddresses": o.nodePortAddresses(config, mode == "nftables"), mode: dialect,
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s",
			"tcpCloseWaitTimeout": "0s"},
		"healthzBindAddress": "127.0.0.1:10256", "metricsBindAddress": "127.0.0.1:10249",
	}
	if mode == "iptables" {
		dialect["localhostNodePorts"] = config.LoopbackNodePorts
	}
	switch pods := config.Pods; {
	case strings.HasSuffix(pods.Interface, "+"):
		c["detectLocalMode"], c["detectLocal"] = "InterfaceNamePrefix",
			map[string]any{"interfaceNamePrefix": strings.TrimSuffix(pods.Interface, "+")}
	case pods.Interface != "":
		c["detectLocalMode"], c["detectLocal"] = "BridgeInterface", map[string]any{"bridgeInterface": pods.Interface}
	default:
		c["clusterCIDR"] = join(pods.Prefixes)
	}
	text, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(o.folder, "kube-proxy.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (o *contest) landfallFlags(mode string, config plan.Config) []string {
	flags := []string{
		"--mode=" + mode, "--kubeconfig=" + o.kubeconfig, "--node-name=" + cases.Here,
		"--feed-socket=" + filepath.Join(o.folder, "feed.sock"),
		"--metrics-bind-address=0", "--healthz-bind-address=0", "--drain-time=0s",
		fmt.Sprint("--masquerade-bit=", config.MasqueradeBit),
		fmt.Sprint("--masquerade-all=", config.MasqueradeAll),
		"--nodeport-addresses=" + strings.Join(o.nodePortAddresses(config, false), ","),
	}
	switch pods := config.Pods; {
	case strings.HasSuffix(pods.Interface, "+"):
		flags = append(flags, "--detect-local-mode=InterfaceNamePrefix",
			"--pod-interface-name-prefix="+strings.TrimSuffix(pods.Interface, "+"))
	case pods.Interface != "":
		flags = append(flags, "--detect-local-mode=BridgeInterface", "--pod-bridge-interface="+pods.Interface)
	default:
		flags = append(flags, "--cluster-cidr="+join(pods.Prefixes))
	}
	return flags
}

// nodePortAddresses are networks of the addresses that serve node ports; nil for all. kube-proxy's
// nftables mode needs them by name.
func (o *contest) nodePortAddresses(config plan.Config, tell bool) []string {
	var networks []string
	for family, addrs := range config.NodePortAddresses {
		if len(addrs) == 0 { // a network that the node has no address in
			networks = append(networks, map[lb.Family]string{lb.IPv4: "203.0.113.0/24", lb.IPv6: "2001:db8:ffff::/64"}[family])
		}
		for _, a := range addrs {
			networks = append(networks, cases.Host(a).String())
		}
	}
	if len(networks) == 0 && tell {
		return []string{"0.0.0.0/0", "::/0"}
	}
	return networks
}

func join(prefixes []netip.Prefix) string {
	var words []string
	for _, p := range prefixes {
		words = append(words, p.String())
	}
	return strings.Join(words, ",")
}

// wait asks the marker's port until it answers: then all that was written before it is in the
// rules.
func (o *contest) wait(t *testing.T, at netip.AddrPort) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := o.site.Reach(t, "node", at, 200*time.Millisecond)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the marker at %s does not answer: %v", at, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
