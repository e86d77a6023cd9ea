package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Agent is one container of the chart on one node: a process in the node's network namespace, with the arguments, variables,
// volumes, capabilities, user and ServiceAccount that the chart gives it. Its methods may be called from several goroutines.
type Agent struct {
	// Program is the container's name: controller, speaker or proxy.
	Program string
	// Node is the name of the node that it runs on.
	Node string

	lab     *Lab
	spec    command
	grace   time.Duration
	ready   string            // URL of the readiness probe; "" if there is none
	mounts  map[string]string // what the container's paths are outside
	mu      sync.Mutex
	process *process
}

// Agent returns an agent by the name of its container and its node, or nil.
func (l *Lab) Agent(program, node string) *Agent {
	for _, a := range l.agents {
		if a.Program == program && a.Node == node {
			return a
		}
	}
	return nil
}

// Agents returns all agents of a program, in the order of the nodes.
func (l *Lab) Agents(program string) []*Agent {
	var agents []*Agent
	for _, a := range l.agents {
		if a.Program == program {
			agents = append(agents, a)
		}
	}
	return agents
}

// Name returns the name of the agent's log: node and program.
func (a *Agent) Name() string { return a.Node + "-" + a.Program }

// Log returns what the agent has written, over all its starts.
func (a *Agent) Log() string {
	text, err := os.ReadFile(a.lab.logPath(a.Name()))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Start starts the process. It does not wait until the agent is ready: see [Agent.WaitReady].
func (a *Agent) Start() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process != nil && a.process.running() {
		return fmt.Errorf("%s runs already", a.Name())
	}
	p, err := a.lab.startProcess(a.Name(), a.spec)
	if err == nil {
		a.process = p
	}
	return err
}

// Stop sends SIGTERM and waits until the process has ended. A process that outlives the pod's grace period is killed. That, and
// an exit status other than 0, is an error.
func (a *Agent) Stop() error {
	return a.end(func(p *process) error { return p.stop(a.grace) })
}

// Kill sends SIGKILL and waits until the process is gone.
func (a *Agent) Kill() error { return a.end((*process).kill) }

func (a *Agent) end(how func(*process) error) error {
	p := a.current()
	if p == nil || !p.running() {
		return fmt.Errorf("%s does not run", a.Name())
	}
	if err := how(p); err != nil {
		return fmt.Errorf("%s: %w", a.Name(), err)
	}
	return nil
}

// Restart stops the agent and starts it again, as a rolling update does, and waits until it is ready.
func (a *Agent) Restart(ctx context.Context) error {
	if err := a.Stop(); err != nil {
		return err
	}
	if err := a.Start(); err != nil {
		return err
	}
	return a.WaitReady(ctx)
}

// Signal sends a signal, such as SIGSTOP.
func (a *Agent) Signal(sig syscall.Signal) error {
	p := a.current()
	if p == nil {
		return fmt.Errorf("%s does not run", a.Name())
	}
	return p.signal(sig)
}

// Running says whether the process is there.
func (a *Agent) Running() bool {
	p := a.current()
	return p != nil && p.running()
}

func (a *Agent) current() *process {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.process
}

// WaitReady waits until the chart's readiness probe succeeds, at most half a minute.
func (a *Agent) WaitReady(ctx context.Context) error {
	return a.lab.waitReady(ctx, a.Program+" on "+a.Node, []*Agent{a})
}

// waitReady waits until all agents are ready. The error is about the first that is not, with the end of its log.
func (l *Lab) waitReady(ctx context.Context, what string, agents []*Agent) error {
	ready := 0
	err := WaitFor(ctx, l.progress, what, 30*time.Second, func(ctx context.Context) error {
		for ready < len(agents) {
			if err := agents[ready].probe(ctx); err != nil {
				return err
			}
			ready++
		}
		return nil
	})
	if err != nil && ready < len(agents) {
		return fmt.Errorf("%w\n%s", err, tail(l.logPath(agents[ready].Name()), 12))
	}
	return err
}

// probe does once what the kubelet does every few seconds.
func (a *Agent) probe(ctx context.Context) error {
	if !a.Running() {
		return permanent{fmt.Errorf("%s has ended", a.Name())}
	}
	if a.ready == "" {
		return nil
	}
	code, body, err := a.lab.Get(ctx, a.Node, a.ready)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%s on %s: %d %s", a.Program, a.Node, code, strings.TrimSpace(body))
	}
	return err
}

// Get asks the agent's own HTTP server for a path, such as /v1/status.
func (a *Agent) Get(ctx context.Context, path string) (string, error) {
	base, _, _ := strings.Cut(strings.TrimPrefix(a.ready, "http://"), "/")
	code, body, err := a.lab.Get(ctx, a.Node, "http://"+base+path)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%s: %s: %d %s", a.Name(), path, code, strings.TrimSpace(body))
	}
	return body, err
}

// Path returns where a path below one of the container's mounts is outside, for a test to look at.
func (a *Agent) Path(inside string) string {
	for to, from := range a.mounts {
		if rest, ok := strings.CutPrefix(inside, to); ok && (rest == "" || rest[0] == '/') {
			return from + rest
		}
	}
	return inside
}

// SetProgram lets later starts use another executable, as an upgrade does.
func (a *Agent) SetProgram(path string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spec.Argv = append([]string{path}, a.spec.Argv[1:]...)
}

// account is a ServiceAccount as a pod gets it: a folder with a token that the API server has issued and its certificate.
type account struct{ Name, Folder string }

// serviceAccount asks the API server for a token of a ServiceAccount that the chart has made, so that what an agent may do is
// what the chart's roles say. A kubeconfig with that token is written beside it, for a person to start a program by hand.
func (l *Lab) serviceAccount(ctx context.Context, name string) (account, error) {
	acc := account{Name: name, Folder: l.state.path("agents", name)}
	if _, err := os.Stat(acc.Folder); err == nil {
		return acc, nil
	}
	day := int64((24 * time.Hour).Seconds())
	token, err := l.kube.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, name,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &day}}, metav1.CreateOptions{})
	if err != nil {
		return acc, fmt.Errorf("token of ServiceAccount %s: %w", name, err)
	}
	if err := os.Mkdir(acc.Folder, 0o755); err != nil {
		return acc, err
	}
	for file, content := range map[string][]byte{"token": []byte(token.Status.Token), "ca.crt": l.control.ca.pem, "namespace": []byte(Namespace)} {
		// Readable by all, as in a pod: the programs do not all run as root.
		if err := os.WriteFile(filepath.Join(acc.Folder, file), content, 0o644); err != nil {
			return acc, err
		}
	}
	return acc, clientcmd.WriteToFile(*l.control.kubeconfig(&clientcmdapi.AuthInfo{Token: token.Status.Token}), acc.Folder+".kubeconfig")
}

// newAgent translates a container for the lab.
func (l *Lab) newAgent(ctx context.Context, owner string, pod corev1.PodSpec, c corev1.Container, n Node, acc account) (*Agent, error) {
	a := &Agent{Program: c.Name, Node: n.Name, lab: l, grace: 30 * time.Second, mounts: map[string]string{}}
	if pod.TerminationGracePeriodSeconds != nil {
		a.grace = time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second
	}
	env, err := containerEnv(c, n, acc)
	if err != nil {
		return nil, err
	}
	if len(c.Command) == 0 {
		return nil, errors.New("no command: the lab does not know the image's entry point")
	}
	program, err := l.program(filepath.Base(c.Command[0]))
	if err != nil {
		return nil, err
	}
	argv := []string{program}
	for _, arg := range append(append(c.Command[1:], c.Args...), l.options.Args[c.Name]...) {
		argv = append(argv, expand(arg, env))
	}
	a.spec = command{Host: n.Name, Argv: argv, Env: append(env, l.options.Env[c.Name]...), Privileges: privileges(pod, c)}
	if a.spec.Mounts, err = l.containerMounts(ctx, owner, pod, c, n, acc); err != nil {
		return nil, err
	}
	for _, m := range a.spec.Mounts {
		a.mounts[m.To] = m.From
	}
	a.ready, err = readinessURL(c, n)
	return a, err
}

// containerEnv returns the container's variables, with the fields of the pod that they refer to filled in.
func containerEnv(c corev1.Container, n Node, acc account) ([]string, error) {
	fields := map[string]string{
		"spec.nodeName": n.Name, "spec.serviceAccountName": acc.Name, "metadata.namespace": Namespace,
		"metadata.name": c.Name + "-" + n.Name, "status.hostIP": n.Addr.String(), "status.podIP": n.Addr.String(),
	}
	var env []string
	for _, e := range c.Env {
		value := expand(e.Value, env)
		if e.ValueFrom != nil {
			var ok bool
			if e.ValueFrom.FieldRef != nil {
				value, ok = fields[e.ValueFrom.FieldRef.FieldPath]
			}
			if !ok {
				return nil, fmt.Errorf("variable %s: the lab does not know this source", e.Name)
			}
		}
		env = append(env, e.Name+"="+value)
	}
	return env, nil
}

// expand replaces $(NAME) by variables defined so far, as the kubelet does.
func expand(s string, env []string) string {
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		s = strings.ReplaceAll(s, "$("+name+")", value)
	}
	return s
}

// privileges returns setpriv's arguments for the user and the capabilities that the pod asks for.
func privileges(pod corev1.PodSpec, c corev1.Container) []string {
	var args []string
	sc := c.SecurityContext
	if sc == nil {
		sc = &corev1.SecurityContext{}
	}
	user := sc.RunAsUser
	if user == nil && pod.SecurityContext != nil {
		user = pod.SecurityContext.RunAsUser
	}
	if user != nil && *user != 0 {
		id := strconv.FormatInt(*user, 10)
		args = append(args, "--reuid="+id, "--regid="+id, "--clear-groups")
	}
	if sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation {
		args = append(args, "--no-new-privs")
	}
	if sc.Capabilities != nil && len(sc.Capabilities.Drop) == 1 && sc.Capabilities.Drop[0] == "ALL" {
		bounding := []string{"-all"}
		for _, added := range sc.Capabilities.Add {
			bounding = append(bounding, "+"+strings.ToLower(strings.TrimPrefix(string(added), "CAP_")))
		}
		args = append(args, "--inh-caps=-all", "--bounding-set="+strings.Join(bounding, ","))
	}
	return args
}

// containerMounts returns the container's mounts. Those of the pod's own volumes are folders that live as long as the lab;
// paths of the host are the node's below /run, and the machine's elsewhere.
func (l *Lab) containerMounts(ctx context.Context, owner string, pod corev1.PodSpec, c corev1.Container, n Node, acc account) ([]mount, error) {
	volumes := map[string]corev1.Volume{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = v
	}
	mounts := []mount{{From: acc.Folder, To: "/run/secrets/kubernetes.io/serviceaccount"}}
	for _, m := range c.VolumeMounts {
		v := volumes[m.Name]
		from := ""
		switch {
		case m.SubPath != "":
			return nil, fmt.Errorf("volume %s: the lab does not do subPath", m.Name)
		case v.EmptyDir != nil:
			from = l.state.path("volumes", owner+"-"+n.Name, m.Name)
			if err := os.MkdirAll(from, 0o777); err != nil {
				return nil, err
			}
		case v.HostPath != nil:
			from = v.HostPath.Path
			if rest, ok := strings.CutPrefix(from, "/run/"); ok {
				from = filepath.Join(l.runDir(n.Name), rest)
				if err := makePath(from, v.HostPath.Type); err != nil {
					return nil, err
				}
			}
		case v.Secret != nil:
			var err error
			if from, err = l.secretFolder(ctx, owner+"-"+n.Name, m.Name, v.Secret); err != nil {
				return nil, fmt.Errorf("volume %s: %w", m.Name, err)
			}
		default:
			return nil, fmt.Errorf("volume %s: the lab does not know this kind", m.Name)
		}
		mounts = append(mounts, mount{From: from, To: m.MountPath})
	}
	for _, m := range mounts {
		if err := l.makeMountPoint(m, n); err != nil {
			return nil, err
		}
	}
	return mounts, nil
}

// secretFolder writes the items of a Secret that a volume names into a folder.
func (l *Lab) secretFolder(ctx context.Context, pod, volume string, source *corev1.SecretVolumeSource) (string, error) {
	secret, err := l.kube.CoreV1().Secrets(Namespace).Get(ctx, source.SecretName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	folder := l.state.path("volumes", pod, volume)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	for _, item := range source.Items {
		if err := os.WriteFile(filepath.Join(folder, item.Path), secret.Data[item.Key], 0o400); err != nil {
			return "", err
		}
	}
	return folder, nil
}

// makePath makes what a hostPath volume of a type that creates would make.
func makePath(path string, kind *corev1.HostPathType) error {
	if kind != nil && *kind == corev1.HostPathFileOrCreate {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		return f.Close()
	}
	return os.MkdirAll(path, 0o755)
}

// makeMountPoint makes the path that m covers, which must be below the node's own /run: the lab makes no folders on the machine.
func (l *Lab) makeMountPoint(m mount, n Node) error {
	rest, ok := strings.CutPrefix(m.To, "/run/")
	if !ok {
		if _, err := os.Stat(m.To); err != nil {
			return fmt.Errorf("mount at %s: it is not below /run, and not there on this machine: %w", m.To, err)
		}
		return nil
	}
	info, err := os.Stat(m.From)
	if err != nil {
		return err
	}
	kind := corev1.HostPathDirectoryOrCreate
	if !info.IsDir() {
		kind = corev1.HostPathFileOrCreate
	}
	return makePath(filepath.Join(l.runDir(n.Name), rest), &kind)
}

// readinessURL returns what the kubelet would ask to learn whether the container is ready.
func readinessURL(c corev1.Container, n Node) (string, error) {
	if c.ReadinessProbe == nil || c.ReadinessProbe.HTTPGet == nil {
		return "", nil
	}
	get := c.ReadinessProbe.HTTPGet
	port := get.Port.IntValue()
	if get.Port.Type == intstr.String {
		for _, p := range c.Ports {
			if p.Name == get.Port.StrVal {
				port = int(p.ContainerPort)
			}
		}
	}
	if port == 0 {
		return "", fmt.Errorf("readiness probe: no port %s", get.Port.String())
	}
	return "http://" + net.JoinHostPort(n.Addr.String(), strconv.Itoa(port)) + get.Path, nil
}

// program copies a program into the lab, as an image would hold it, and returns its path there: a later build does not touch a running
// lab, and programs that do not run as root can read it.
func (l *Lab) program(name string) (string, error) {
	path := l.state.path("bin", name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, copyFile(filepath.Join(l.options.Programs, name), path)
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// buildPrograms builds Landfall's programs and returns their folder.
func buildPrograms(ctx context.Context, repo string, progress func(string)) (string, error) {
	cmd := exec.CommandContext(ctx, "make", "-C", repo, "--no-print-directory", "build")
	// "make demo" runs the lab: what it hands down is not for this make.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "MAKE") || strings.HasPrefix(e, "MFLAGS=") })
	bin := filepath.Join(repo, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	unlock, err := waitForFile(ctx, filepath.Join(bin, ".lock"), progress) // tests of several packages run at the same time
	if err != nil {
		return "", err
	}
	defer unlock()
	return bin, watched(ctx, progress, "building Landfall's programs", cmd)
}
