package lab

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// account is a ServiceAccount as a pod gets it: a folder with a token that the API server has
// issued and its certificate.
type account struct{ Name, Folder string }

// serviceAccount asks the API server for a token of a ServiceAccount that the chart has made, bound
// to a pod on a node as the kubelet's are, so that what an agent may do is what the chart's roles
// and policies say. A kubeconfig with that token is written beside it, for a person to start a
// program by hand.
func (l *Lab) serviceAccount(ctx context.Context, owner, name string, n Node) (account, error) {
	acc := account{Name: name, Folder: l.state.path("agents", owner+"-"+n.Name)}
	if _, err := os.Stat(acc.Folder); err == nil {
		return acc, nil
	}
	// The pod is there for the token only: no kubelet runs it.
	pod, err := l.kube.CoreV1().Pods(Namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: owner + "-" + n.Name},
		Spec: corev1.PodSpec{NodeName: n.Name, ServiceAccountName: name,
			Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return acc, err
	}
	day := int64((24 * time.Hour).Seconds())
	token, err := l.kube.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, name,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &day,
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name,
				UID: pod.UID}}},
		metav1.CreateOptions{})
	if err != nil {
		return acc, fmt.Errorf("token of ServiceAccount %s: %w", name, err)
	}
	if err := os.Mkdir(acc.Folder, 0o755); err != nil {
		return acc, err
	}
	for file, content := range map[string][]byte{"token": []byte(token.Status.Token), "ca.crt": l.control.ca.pem,
		"namespace": []byte(Namespace)} {
		// Readable by all, as in a pod: the programs do not all run as root.
		if err := os.WriteFile(filepath.Join(acc.Folder, file), content, 0o644); err != nil {
			return acc, err
		}
	}
	return acc,
		clientcmd.WriteToFile(*l.control.kubeconfig(&clientcmdapi.AuthInfo{Token: token.Status.Token}),
			acc.Folder+".kubeconfig")
}

// newAgent translates a container for the lab.
func (l *Lab) newAgent(ctx context.Context, owner string, pod corev1.PodSpec, c corev1.Container, n Node,
	acc account) (*Agent, error) {
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
	if c.ReadinessProbe != nil && c.ReadinessProbe.Exec != nil {
		a.readyCommand = c.ReadinessProbe.Exec.Command
	}
	a.ready, err = readinessURL(c, n)
	return a, err
}

// containerEnv returns the container's variables, with the fields of the pod that they refer to
// filled in.
func containerEnv(c corev1.Container, n Node, acc account) ([]string, error) {
	fields := map[string]string{
		"spec.nodeName": n.Name, "spec.serviceAccountName": acc.Name, "metadata.namespace": Namespace,
		"metadata.name": c.Name + "-" + n.Name, "metadata.uid": rand.Text(), "status.hostIP": n.Addr.String(),
		"status.podIP": n.Addr.String(),
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

// containerMounts returns the container's mounts. Those of the pod's own volumes are folders that
// live as long as the lab; paths of the host are the node's below /run, and the machine's
// elsewhere.
func (l *Lab) containerMounts(ctx context.Context, owner string, pod corev1.PodSpec, c corev1.Container, n Node,
	acc account) ([]mount, error) {
	volumes := map[string]corev1.Volume{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = v
	}
	mounts := []mount{{From: acc.Folder, To: "/run/secrets/kubernetes.io/serviceaccount"}}
	for _, m := range c.VolumeMounts {
		v := volumes[m.Name]
		from, podsOwn := "", false
		switch {
		case m.SubPath != "":
			return nil, fmt.Errorf("volume %s: the lab does not do subPath", m.Name)
		case v.EmptyDir != nil:
			from, podsOwn = l.state.path("volumes", owner+"-"+n.Name, m.Name), true
			if err := os.MkdirAll(from, 0o777); err != nil {
				return nil, err
			}
			if err := os.Chmod(from, 0o777); err != nil { // as the kubelet, for containers that are not root
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
		mounts = append(mounts, mount{From: from, To: m.MountPath, PodsOwn: podsOwn})
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

// makeMountPoint makes the path that m covers, which must be below the node's own /run: the lab
// makes no folders on the machine.
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
	scheme := strings.ToLower(string(cmp.Or(get.Scheme, corev1.URISchemeHTTP)))
	return scheme + "://" + net.JoinHostPort(cmp.Or(get.Host, n.Addr.String()), strconv.Itoa(port)) + get.Path, nil
}
